"""A rank that fails gives one line on the terminal and a traceback in its log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.local import death_of_a_rank
from mcore_qwen3vl.training.logs.terminal import report_crash


def _fail() -> None:
    raise ValueError("the second line\nis left out")


def test_one_line_and_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    log = log_file(tmp_path, 3)
    with pytest.raises(ValueError, match="second") as raised:
        _fail()
    report_crash(raised.value, CommandLine(["--lr", "1", "--save", str(tmp_path)]), aloud=False)
    assert capsys.readouterr().err == ""
    assert "in _fail" in log.read_text()
    report_crash(raised.value, CommandLine(["--save", str(tmp_path)]))
    assert capsys.readouterr().err == (
        f"error: rank 3: ValueError: the second line. The traceback is in {log}.\n"
    )
    report_crash(raised.value, CommandLine(["--lr", "1"]))  # there is no log
    assert "in _fail" in capsys.readouterr().err
    report_crash(FloatingPointError("In step 2 the loss is NaN"), CommandLine(["--lr", "1"]))
    assert capsys.readouterr().err == "error: rank 3: In step 2 the loss is NaN.\n"


def _ended(code: int, at: float) -> SimpleNamespace:
    return SimpleNamespace(exitcode=code, timestamp=at)


def test_the_rank_that_was_killed_is_the_cause_whoever_is_noticed_first() -> None:
    failures = {0: _ended(1, 1.0), 1: _ended(-9, 2.0), 2: _ended(-15, 0.5)}
    assert death_of_a_rank(failures).startswith("rank 1 was killed by SIGKILL, as the system does")
    del failures[1], failures[2]
    assert death_of_a_rank({**failures, 4: _ended(1, 0.1)}) == "rank 4 ended with exit code 1"
