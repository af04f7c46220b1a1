"""A run's output goes to the terminal or to its log file, by what it is."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.logs.terminal import CLEAR_LINE, LogFile, quiet


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove pytest's own handlers, which would see the records too."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("3", False)])
def test_prints_and_notes_go_to_the_file_and_warnings_to_the_terminal_too(
    rank: str,
    shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    level = logging.getLogger().level
    with quiet(CommandLine(["--save", str(tmp_path), "--no-such-flag"])) as screen:
        print("a thousand lines")
        logging.getLogger("some.library").info("noted")
        for _ in range(2):
            logging.getLogger("some.library").warning("a library warns")
        warnings.warn("of no use", FutureWarning, stacklevel=1)
        for _ in tqdm(range(2)):
            pass
        logging.getLogger("mcore_qwen3vl.data").warning("bad sample")
        assert screen is not None
        screen.print("a summary")
    assert logging.getLogger().level == level
    out, err = capsys.readouterr()
    assert out == "a summary\n"
    assert err.splitlines() == ["warning: a library warns"] * shown + ["warning: bad sample"]
    kept = log_file(tmp_path, int(rank)).read_text()
    for text in ("a thousand lines", "noted", "a library warns", "bad sample"):
        assert text in kept
    print("as ever")
    assert capsys.readouterr().out == "as ever\n"


def test_verbose_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with quiet(CommandLine(["--save", str(tmp_path), "--verbose"])) as screen:
        print("a thousand lines")
    assert screen is None
    assert capsys.readouterr().out == "a thousand lines\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_it_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet(CommandLine([])):
        print("a thousand lines")
    assert capsys.readouterr().out == ""


def test_a_warning_starts_on_a_line_of_its_own_above_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = Terminal()
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("sys.stderr", errors)
    with quiet(CommandLine([])):
        logging.getLogger("mcore_qwen3vl").warning("one")
        print("two\nthree", file=sys.stderr)
    assert errors.getvalue() == f"{CLEAR_LINE}warning: one\n{CLEAR_LINE}two\nthree\n"


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    with LogFile(log_file(tmp_path, 0)) as file:
        assert file.write("gone\n") == 5
        assert file.write("gone\n") == 5
