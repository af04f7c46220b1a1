"""Progress of a run: a bar on a terminal, elsewhere one line per log interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from mcore_qwen3vl.console import visible

_LOSSES = (
    *("dpo loss", "simpo loss", "orpo loss", "kto loss", "distill loss"),
    *("contrastive loss", "similarity loss", "reranker loss", "reward loss", "classification loss"),
    "lm loss",  # the last, because a distillation has it beside its own
)


def loss_name(numbers: Collection[str]) -> str | None:
    """Return which of the log's names is that of the loss that the run minimises, if any is."""
    return next((name for name in _LOSSES if name in numbers), None)


class RunProgress:
    """Shows steps, loss, speed and the time left.

    Only the last rank of a run shows it, because that rank knows the loss; the others have one
    without a screen.
    """

    def __init__(
        self, screen: Console | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.steps = 0
        """Number of the last step that has ended."""
        self._screen = screen
        self._total = 0
        self._clock = clock
        self._started = clock()
        self._first: tuple[int, float] | None = None  # step, and when it ended
        self._last: tuple[int, float] | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def elapsed(self) -> timedelta:
        """Time since the start, in whole seconds."""
        return timedelta(seconds=round(self._clock() - self._started))

    def step(self, step: int, total: int) -> None:
        """Record that step `step` of `total` has ended; both count the steps before a resume."""
        self.steps, self._total = step, total
        if self._screen is None:
            return
        if self._first is None:
            self._first = self._last = step, self._clock()
        if self._screen.is_terminal:
            self._update_bar(completed=step)

    def show(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Show a step's numbers, by the names of ``--log-json``; call :meth:`step` first."""
        if self._screen is None:
            return
        assert self._last is not None
        at, now = self._last, self._clock()
        parts = [f"{name} {text}" for name, text in _parts(numbers)]
        if "tokens/s" in numbers:
            parts.append(f"{numbers['tokens/s']:,.0f} tokens/s")
        if step > at[0]:
            parts.append(f"{(now - at[1]) / (step - at[0]):.3g} s/step")
            parts.append(f"{self._left(step, now)} left")
            self._last = step, now
        if self._screen.is_terminal:
            self._update_bar(numbers="  ".join(parts))
        else:
            self.say("  ".join([f"step {step}/{self._total}", *parts]))

    def say(self, text: str) -> None:
        """Print `text` on a line of its own."""
        if self._screen is not None:
            self._screen.print(visible(text), markup=False, soft_wrap=True)

    def _left(self, step: int, now: float) -> timedelta:
        """Return the time left at this run's mean pace, which includes saving and validation."""
        assert self._first is not None
        first, since = self._first
        pace = (now - since) / (step - first)
        return timedelta(seconds=round(pace * (self._total - step)))

    def _update_bar(self, **change: object) -> None:
        assert self._screen is not None
        if self._bar is None:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[numbers]}"),
                console=self._screen,
                # Drawn when something changes, not by a thread, which forked data workers would
                # lack. The bar holds back no other output.
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, numbers="")
        self._bar.update(self._task, refresh=True, **change)  # type: ignore[arg-type]


def _parts(numbers: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return short names and formatted values, for a narrow line."""
    loss = loss_name(numbers)
    chosen = (
        ("loss", numbers[loss] if loss else None, ".4f"),
        ("lm loss", numbers.get("lm loss") if loss != "lm loss" else None, ".4f"),
        ("margin", numbers.get("rewards margin"), ".3g"),
        ("accuracy", numbers.get("rewards accuracy", numbers.get("accuracy")), ".2f"),
        ("grad norm", numbers.get("grad norm"), ".3g"),
        ("lr", numbers.get("learning rate"), ".3g"),
        ("skipped", numbers.get("skipped samples") or None, ".0f"),
        ("skipped steps", numbers.get("skipped steps") or None, ".0f"),
        ("over-long", numbers.get("over-long samples") or None, ".0f"),
    )
    return [(name, format(value, form)) for name, value, form in chosen if value is not None]
