"""A folder has one writer, and is published whole: if that is stopped, what is said is true.

Each stop is in a process of its own: the process is killed there, or its system refuses the call.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.storage.staging import (
    check_target,
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
