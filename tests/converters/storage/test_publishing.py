"""Publishing a folder is stopped at each of its calls: what is said is true, and the next run ends.

Each stop is in a process of its own, which is killed there or whose system refuses the call.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.storage.staging import (
    discard_remains,
    staging,
    targets_of_remains,
    write_durably,
)
from mcore_qwen3vl.errors import BadInput
from tests.writes import kill_at, refuse_at

OLD, NEW = {"a": "1", "b/c": "2", "b/d": "3"}, {"a": "4", "b/c": "5"}
CALLS = 12
"""At least so many calls publish these files; fewer would mean that some are not noticed."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_durably(folder / name, text.encode())


def read(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def publish(
    target: Path, prepare: Callable[[], None] = lambda: None, *, force: bool = True
) -> None:
    with staging(target, "plan", force=force, replaceable=lambda there: True) as stage:
        write(stage.tree, NEW)
        prepare()
        stage.publish()


def report(pipe: Any, target: Path, prepare: Callable[[], None]) -> None:
    """Publish, and send what was said: by an exception, or by warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        publish(target, prepare)
    except (BadInput, OSError) as error:
        said.append(f"{type(error).__name__}: {error}")
    pipe.send(said)


def stopped(target: Path, prepare: Callable[[], None]) -> list[str] | None:
    """Publish in another process; return what it said, or None if it was killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(theirs, target, prepare))
    process.start()
    theirs.close()
    said: list[str] | None = None
    with suppress(EOFError):
        said = ours.recv()
    process.join()
    assert (said is None) == (process.exitcode == -signal.SIGKILL)
    return said


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write(tmp_path / "target", OLD)
    return tmp_path / "target"


def begin_anew(target: Path) -> None:
    for path in target.parent.iterdir():
        shutil.rmtree(path)
    write(target, OLD)


def check_next_run(target: Path, *, force: bool = True) -> None:
    publish(target, force=force)
    assert read(target) == NEW
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("then", ["run again", "remove and run again", "discard"])
def test_killed_at_each_call(then: str, target: Path) -> None:
    for number in count(1):
        begin_anew(target)
        if stopped(target, partial(kill_at, target.parent, number)) is not None:
            break
        if target.exists():
            assert read(target) in (OLD, NEW)
        if then == "discard":
            assert targets_of_remains(target.parent) == [target]
            discard_remains(target)
            assert read(target) in (OLD, NEW)
            assert list(target.parent.iterdir()) == [target]
            continue
        removed = then == "remove and run again" and target.exists()
        if removed:
            shutil.rmtree(target)
        check_next_run(target, force=not removed)
    assert number > CALLS


@pytest.mark.parametrize("lasting", [False, True])
def test_refused_at_each_call(lasting: bool, target: Path) -> None:
    work = target.with_name(".target.incomplete")
    kinds = set()
    for number in count(1):
        begin_anew(target)
        said = stopped(target, partial(refuse_at, target.parent, number, lasting=lasting))
        assert said is not None
        if not said:
            break
        (message,) = said
        if message.startswith("OSError"):
            kinds.add("as it was")
            assert read(target) == OLD
            assert read(work / "tree") == NEW
        elif f"The old one is in {work / 'replaced'}, and running" in message:
            kinds.add("moved away")
            assert not target.exists()
            assert read(work / "replaced") == OLD
        else:
            kinds.add("published")
            assert f"{target} is complete, but" in message
            assert read(target) == NEW
            if "What it replaced is in" in message:
                assert f"in {work / 'replaced'}." in message
                assert read(work / "replaced") == OLD
            else:
                assert f"{work.name} beside it could not be deleted" in message
                assert work.exists()
        check_next_run(target)
    assert number > CALLS
    assert kinds == {"as it was", "published"} | ({"moved away"} if lasting else set())


def test_a_tree_that_can_be_neither_published_nor_dropped_keeps_what_it_was_to_replace(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that turns every error into BadInput deletes its work, but not the old target."""
    rename = Path.rename

    def refuse(path: Path, to: Path) -> Path:
        if to == target:
            raise OSError("refused")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(BadInput, match="running the same command again puts it back"):
            publish(target)
    assert not target.exists()
    check_next_run(target)


def test_without_remains_nothing_is_done(tmp_path: Path) -> None:
    assert not targets_of_remains(tmp_path)
    assert not discard_remains(tmp_path / "nothing")
    assert os.listdir(tmp_path) == []


def test_remains_that_cannot_be_deleted_are_named(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run, whose other ranks wait, goes on."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Device or resource busy")

    begin_anew(target)
    assert stopped(target, partial(kill_at, target.parent, CALLS // 2)) is None
    (target.parent / ".a_file.incomplete").touch()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert targets_of_remains(target.parent) == [target]
    assert discard_remains(target)
    assert f".{target.name}.incomplete, which an interrupted command has left" in caplog.text
    assert "Device or resource busy" in caplog.text
