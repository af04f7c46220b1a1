"""A run shows its progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from rich.console import Console

from mcore_qwen3vl.training.logs.terminal import RunProgress

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


def test_what_went_wrong_with_data_is_shown_when_there_is_any(clock: Clock) -> None:
    out = io.StringIO()
    with closing(RunProgress(Console(file=out, width=1000), clock=clock)) as progress:
        progress.step(1, 2)
        progress.show(1, {"lm loss": 1.0, "skipped samples": 0.0, "over-long samples": 3.0})
    assert out.getvalue() == "step 1/2  loss 1.0000  over-long 3\n"


def test_a_distillation_shows_the_loss_that_it_minimises_and_the_cross_entropy(
    clock: Clock,
) -> None:
    out = io.StringIO()
    with closing(RunProgress(Console(file=out, width=1000), clock=clock)) as progress:
        progress.step(1, 2)
        numbers = {"lm loss": 3.0, "distill loss": 1.0, "divergence": 0.5, "grad norm": 2.0}
        progress.show(1, numbers)
    assert out.getvalue() == "step 1/2  loss 1.0000  lm loss 3.0000  grad norm 2\n"


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
