"""Each rank of a run ends in one message, or says what starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_one_rank_of_a_node_reports_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_qwen3vl.training.__main__ import entry

    monkeypatch.setattr("mcore_qwen3vl.training.__main__._end_process", sys.exit)
    monkeypatch.setattr("sys.argv", ["train", "--cpu", "--hf-model", str(tmp_path / "gone")])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for rank in range(2):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit) as left:
            entry()
        assert left.value.code == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_without_torchrun_there_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_qwen3vl.training.__main__ import entry

    monkeypatch.setattr("mcore_qwen3vl.training.__main__._end_process", sys.exit)
    monkeypatch.setattr("sys.argv", ["train.py", "--cpu"])
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SystemExit) as left:
        entry()
    assert left.value.code == 2
    assert "torchrun, or train on this machine with `mcore-qwen3vl train`" in (
        capsys.readouterr().err
    )


def test_a_rank_that_fails_ends_before_the_interpreter_destroys_its_threads(tmp_path: Path) -> None:
    """Gloo's threads may abort the process there, when other ranks have ended."""
    program = """
import atexit, os, sys
from pathlib import Path

class Thread:
    def __del__(self, abort=os.abort):
        abort()

thread = Thread()
atexit.register(Path("ended").touch)
sys.argv = ["train"]
os.environ.pop("MASTER_ADDR", None)
from mcore_qwen3vl.training.__main__ import entry
entry()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "one rank of a run. Start it with torchrun" in ran.stderr
    assert ran.returncode == 2
    assert (tmp_path / "ended").exists()
