"""Two processes do not write one place."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.curves import Job
from mcore_qwen3vl.writer_lock import only_writer

FORK = multiprocessing.get_context("fork")


@contextmanager
def held_elsewhere(place: Path) -> Iterator[int]:
    """Let another process hold `place` inside the context; yield its process id."""
    holds = FORK.Event()

    def hold() -> None:
        with only_writer(place):
            holds.set()
            signal.pause()

    process = FORK.Process(target=hold, daemon=True)
    process.start()
    assert holds.wait(60)
    try:
        yield process.pid or 0
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize("folder", [False, True])
def test_the_second_is_told_who_the_first_is(folder: bool, tmp_path: Path) -> None:
    place = tmp_path if folder else tmp_path / "out.jsonl"
    with held_elsewhere(place) as number:
        told = pytest.raises(BadInput, match=rf"Process {number} on .* is writing to {place}")
        with told, only_writer(place):
            pass
    with only_writer(place):  # the first one was killed
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "out.jsonl"
    with (
        pytest.raises(BadInput, match=f"There is no folder {missing.parent} for"),
        only_writer(missing),
    ):
        pass


def test_children_hold_nothing(tmp_path: Path) -> None:
    """A data worker that outlives a killed run does not keep the next one out."""
    reader, writer = os.pipe()
    run = os.fork()
    if not run:
        with only_writer(tmp_path):
            if not os.fork():
                os.write(writer, str(os.getpid()).encode())
            signal.pause()
    worker = int(os.read(reader, 99))
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    try:
        with only_writer(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_locked(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--save", "--save-hf"])
def test_a_run_has_its_checkpoint_directory_alone(
    flag: str, dense: Path, data: Path, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    save.mkdir()
    argv = [*Job(dense, data, steps=1, batch=1).argv, flag, str(save)]

    def run() -> int:
        from mcore_qwen3vl.training.arguments.command_line import CommandLine
        from mcore_qwen3vl.training.run import main

        return main(CommandLine(argv))

    with held_elsewhere(save) as number, pytest.raises(BadInput, match=f"Process {number} on"):
        run_layout(run, 1)
    assert not list(save.glob("iter_*"))
