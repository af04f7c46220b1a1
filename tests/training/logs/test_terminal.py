"""What a run shows on a terminal and elsewhere, and what its log file keeps."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tqdm import tqdm

from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.local import describe_failure
from mcore_qwen3vl.training.logs.terminal import (
    CLEAR_LINE,
    LogFile,
    RunProgress,
    quiet,
    report_crash,
)

NUMBERS = {"lm loss": 1.23456, "grad norm": 2.5, "learning rate": 1e-5, "tokens/s": 5120.4}


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def follow(screen: Console | None, clock: Clock, steps: Iterator[int] | range) -> None:
    with closing(RunProgress(screen, clock=clock)) as progress:
        for step in steps:
            clock.now += 2.0
            progress.step(step, 100)
            if step == steps[0] or step % 10 == 0:  # type: ignore[index]
                progress.show(step, NUMBERS if step % 10 == 0 else {"lm loss": 3.0})
        progress.say("saved [to] run")


def test_elsewhere_than_on_a_terminal_it_is_a_line_an_interval(clock: Clock) -> None:
    out = io.StringIO()
    follow(Console(file=out, width=1000), clock, range(5, 21))
    assert out.getvalue().splitlines() == [
        "step 5/100  loss 3.0000",
        "step 10/100  loss 1.2346  grad norm 2.5  lr 1e-05  5,120 tokens/s  2 s/step  0:03:00 left",
        "step 20/100  loss 1.2346  grad norm 2.5  lr 1e-05  5,120 tokens/s  2 s/step  0:02:40 left",
        "saved [to] run",
    ]


def test_a_terminal_shows_a_bar_that_moves_each_step(clock: Clock) -> None:
    out = io.StringIO()
    follow(Console(file=out, width=120, force_terminal=True), clock, range(5, 21))
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    for step in range(5, 21):
        assert f"step {step}/100" in drawn
    assert "5,120 tokens/s  2 s/step  0:02:40 left" in drawn
    assert out.getvalue().count("\n") == 2  # the line that was said, and the bar's end
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        (
            {"lm loss": 1.0, "skipped samples": 0.0, "over-long samples": 3.0},
            "loss 1.0000  over-long 3",
        ),
        (
            {"lm loss": 3.0, "distill loss": 1.0, "divergence": 0.5, "grad norm": 2.0},
            "loss 1.0000  lm loss 3.0000  grad norm 2",
        ),
    ],
    ids=["what went wrong with data", "a distillation's loss and the cross entropy"],
)
def test_what_there_is_to_show_is_shown(
    numbers: dict[str, float], shown: str, clock: Clock
) -> None:
    out = io.StringIO()
    with closing(RunProgress(Console(file=out, width=1000), clock=clock)) as progress:
        progress.step(1, 2)
        progress.show(1, numbers)
    assert out.getvalue() == f"step 1/2  {shown}\n"


def test_other_ranks_show_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(None, clock, range(5, 21))
    assert capsys.readouterr() == ("", "")


def test_names_do_not_steer_the_terminal(clock: Clock) -> None:
    """For example, the name of a data set in a mixture, or a folder's."""
    for terminal in (True, False):
        out = io.StringIO()
        screen = Console(file=out, width=200, force_terminal=terminal, highlight=False)
        with closing(RunProgress(screen, clock=clock)) as progress:
            progress.step(1, 2)
            progress.show(1, {"lm loss": 1.0})
            progress.say("validation loss of [red]a\x1b]0;title\x07")
        assert r"validation loss of [red]a\x1b]0;title\x07" in out.getvalue()


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


def test_without_a_directory_what_is_printed_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_names_do_not_steer_the_terminal_that_shows_a_log(tmp_path: Path) -> None:
    with LogFile(log_file(tmp_path, 0)) as file:
        file.write(" lm loss a\x1b]0;title\x07: 1\n\tnext\n")
    assert log_file(tmp_path, 0).read_text() == " lm loss a\\x1b]0;title\\x07: 1\n\tnext\n"


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    with LogFile(log_file(tmp_path, 0)) as file:
        assert file.write("gone\n") == 5
        assert file.write("gone\n") == 5


def _fail() -> None:
    raise ValueError("the second line\nis left out")


def test_a_crash_is_one_line_and_a_log(
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
    assert describe_failure(failures).startswith("rank 1 was killed by SIGKILL, as the system does")
    del failures[1], failures[2]
    assert describe_failure({**failures, 4: _ended(1, 0.1)}) == "rank 4 ended with exit code 1"
