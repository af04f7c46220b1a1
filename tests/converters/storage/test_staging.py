"""One process at a time writes a directory, and a process that died leaves no lock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.storage.staging import check_target, staging
from mcore_qwen3vl.errors import BadInput

HOLD = """
import sys
from pathlib import Path
from mcore_qwen3vl.converters.storage.staging import staging

with staging(Path(sys.argv[1]), "plan", force=False, replaceable=lambda path: False) as stage:
    (stage.tree / "file").write_text("half")
    stage.finish("unit", 1)
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
            s.finish(name, 1)
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
