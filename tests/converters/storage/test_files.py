"""Files written past the page cache hold what was written; one process writes a folder."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.storage import disk
from mcore_qwen3vl.converters.storage.disk import BLOCK, BUFFER_BYTES, DirectFile
from mcore_qwen3vl.converters.storage.staging import check_target, staging
from mcore_qwen3vl.errors import BadInput

SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100_000, BUFFER_BYTES + 5]
PWRITE = os.pwrite


@pytest.fixture(params=["direct", "not opened", "not aligned enough", "written in parts"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate file systems that handle direct writes in several ways."""
    opened: list[int | None] = []

    def open_direct(path: Path, flags: int) -> int | None:
        opened.append(None if request.param == "not opened" else os.open(path, flags))
        return opened[-1]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if descriptor in opened:
            assert offset % BLOCK == 0
            assert len(data) % BLOCK == 0
            if request.param == "not aligned enough":
                raise OSError(errno.EINVAL, "Invalid argument")
        if request.param == "written in parts":
            data = data[: max(len(data) // 3, 1)]
        return PWRITE(descriptor, data, offset)

    monkeypatch.setattr(disk, "_open_direct", open_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return str(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_any_size(tmp_path: Path, system: str, seed: int) -> None:
    rng = random.Random(seed)
    expected = bytearray()
    with DirectFile(tmp_path / "file", create=True) as out:
        for _ in range(30):
            piece = rng.randbytes(rng.choice(SIZES[:-1]))
            assert out.write(piece) == len(piece)
            expected += piece
            assert out.tell() == len(expected)
        out.sync()
        assert (tmp_path / "file").read_bytes() == expected
        out.write(expected[:BUFFER_BYTES])
        out.sync()
    assert (tmp_path / "file").read_bytes() == expected + expected[:BUFFER_BYTES]


@pytest.mark.parametrize("seed", range(3))
def test_two_writers_share_blocks_and_keep_the_rest(tmp_path: Path, system: str, seed: int) -> None:
    """Two writers write neighbouring ranges in turns, as workers fill one shard."""
    rng = random.Random(seed)
    expected = bytearray(rng.randbytes(1_000_000))
    (tmp_path / "file").write_bytes(expected)
    bounds = sorted(rng.sample(range(len(expected)), 40))
    ranges = list(zip(bounds[:-1:2], bounds[1::2], strict=True))
    rng.shuffle(ranges)
    a, b = (DirectFile(tmp_path / "file", create=False) for _ in range(2))
    with a, b:
        for number, (start, stop) in enumerate(ranges):
            out, piece = (a, b)[number % 2], rng.randbytes(stop - start)
            out.seek(start)
            out.write(piece)
            expected[start:stop] = piece
        a.sync()
        b.sync()
    assert (tmp_path / "file").read_bytes() == expected


def test_large_pieces(tmp_path: Path) -> None:
    """Pieces larger than the buffer are written right by this machine's own file system."""
    piece = random.Random(0).randbytes(BUFFER_BYTES + 5)
    with DirectFile(tmp_path / "file", create=True) as out:
        out.write(b"head")
        out.write(piece)
        out.write(piece)
        out.sync()
    assert (tmp_path / "file").read_bytes() == b"head" + piece + piece


HOLD = """
import sys
from pathlib import Path
from mcore_qwen3vl.converters.storage.staging import staging

with staging(Path(sys.argv[1]), "plan", force=False, replaceable=lambda path: False) as stage:
    (stage.tree / "file").write_text("half")
    stage.record_finished("unit", 1)
    print("holding", flush=True)
    sys.stdin.read()
"""


def nothing(path: Path) -> bool:
    return False


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    command = [sys.executable, "-c", HOLD, str(target)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "holding\n"
    with (
        pytest.raises(BadInput, match=r"another process is writing .*target"),
        staging(target, "plan", force=False, replaceable=nothing),
    ):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    with staging(target, "plan", force=False, replaceable=nothing) as stage:
        assert stage.done == {"unit": 1}  # the refused process removed nothing
        stage.publish()
    assert (target / "file").read_text() == "half"
    assert list(tmp_path.iterdir()) == [target]


def test_what_may_be_replaced_is_for_the_caller_to_say(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    check_target(target, force=True, replaceable=nothing)  # an empty folder may be replaced
    (target / "file").touch()
    check_target(target, force=True, replaceable=lambda path: (path / "file").exists())
    with pytest.raises(BadInput, match="something other than a checkpoint"):
        check_target(target, force=True, replaceable=nothing)
    with pytest.raises(BadInput, match="add --force"):
        check_target(target, force=False, replaceable=lambda path: True)


def test_work_without_a_fingerprint_is_not_gone_on_with(tmp_path: Path) -> None:
    """A shard of another size would stay in the tree beside the new ones."""
    target = tmp_path / "target"
    for name in ("killed", "whole"):
        with (
            suppress(KeyboardInterrupt),
            staging(target, None, force=False, replaceable=nothing) as s,
        ):
            (s.tree / name).touch()
            s.record_finished(name, 1)
            if name == "killed":
                raise KeyboardInterrupt
            assert list(s.done) == ["whole"]
            s.publish()
    assert [file.name for file in target.iterdir()] == ["whole"]


@pytest.mark.parametrize(("force", "plan"), [(False, "plan"), (True, "plan"), (True, "another")])
def test_what_a_killed_run_was_replacing_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool, plan: str
) -> None:
    """Killed between two renames, it leaves the old target in the hidden folder alone."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def rename_until_killed(path: Path, to: Path) -> Path:
        if to == target:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until_killed)
        with (
            suppress(KeyboardInterrupt),
            staging(target, "plan", force=True, replaceable=lambda there: True) as stage,
        ):
            (stage.tree / "new").touch()
            stage.publish()
    assert not target.exists()
    # This run stops on its own before it publishes, which deletes its work.
    expected = "is refused" if force else "exists. Remove it"

    def refuse() -> None:
        with staging(target, plan, force=force, replaceable=lambda there: True) as stage:
            assert (stage.tree / "new").exists() is (plan == "plan")
            raise BadInput("the work is refused")

    with pytest.raises(BadInput, match=expected):
        refuse()
    assert [file.name for file in target.iterdir()] == ["old"]
    # Without --force the work is kept, as before any other refusal of the target.
    assert (tmp_path / ".target.incomplete" / "tree" / "new").exists() is not force


def test_what_was_replaced_is_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it deletes leaves a part of it."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()

    def publish() -> None:
        with staging(target, "plan", force=True, replaceable=lambda there: True) as stage:
            (stage.tree / "new").touch()
            stage.publish()

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **ignore: ignore or kill())
        with pytest.raises(KeyboardInterrupt):
            publish()
    assert [file.name for file in target.iterdir()] == ["new"]
    target.rename(tmp_path / "elsewhere")
    publish()
    assert [file.name for file in target.iterdir()] == ["new"]
    assert {file.name for file in tmp_path.iterdir()} == {"target", "elsewhere"}
