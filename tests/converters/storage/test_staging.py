"""One process at a time writes a directory, and a process that died leaves no lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
