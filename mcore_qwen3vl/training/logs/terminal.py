"""The terminal of a run: progress, warnings and errors, without Megatron's own output.

Megatron prints about a thousand lines per run. They go to ``logs/rank_NNNNN.txt`` in the checkpoint
directory instead. :mod:`mcore_qwen3vl.training.logs.summary` and :class:`RunProgress` show what a
person wants to see: a bar on a terminal, elsewhere one line per log interval. Warnings and errors
still reach standard error.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from tqdm import tqdm

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.losses.registry import logged_names
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_of

CLEAR_LINE = "\r\x1b[2K"
OWN = "mcore_qwen3vl"

_FOR_DEVELOPERS = (DeprecationWarning, FutureWarning, SyntaxWarning)

_OF_NO_USE = (
    "RerunStateMachine",  # it is in the mode that this package chooses
    "GPTModel IS DEPRECATED",  # advice for the author of a model
    "argument order of load has been changed",  # about a function that Megatron calls
    "assuming the intent is to load in a single process",  # about states that all ranks share
    "async save is deprecated",  # saves are synchronous
    "'pin_memory' argument is set as true but no accelerator",  # --cpu was asked for
)
"""Parts of Megatron's and torch's warnings that every run would show in vain."""


@contextmanager
def quiet(command: CommandLine) -> Iterator[Console | None]:
    """Redirect standard output to a log file, and yield where it went; None with ``--verbose``."""
    if command.settings.training.verbose:
        yield None
        return
    rank = int(os.environ.get("RANK", "0"))
    file = LogFile(log_of(command, rank))
    terminal = sys.stdout
    # Lines of piped output are not folded: it is for files and grep.
    screen = Console(file=terminal, highlight=False, width=None if terminal.isatty() else 1000)
    errors: Any = AboveProgress(sys.stderr) if terminal.isatty() else sys.stderr
    # Each data worker would show a bar while filling its buffer, drawn over the others' bars.
    no_bars = mock.patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True))
    with redirect_stdout(file), redirect_stderr(errors), _logging_to(file, errors, rank), no_bars:
        yield screen
    file.close()


def report_crash(error: Exception, command: CommandLine, *, aloud: bool = True) -> None:
    """Write a rank's traceback to its log, and print the error and where the log is.

    Without ``--save`` there is no log, so the traceback is printed. The exceptions are a loss that
    is no number, and a file refused by the system: their messages say all there is. It is not
    `aloud` if another rank has printed its own.
    """
    rank = int(os.environ.get("RANK", "0"))
    place = log_of(command, rank)
    refused = isinstance(error, OSError) and error.filename is not None
    explained = isinstance(error, FloatingPointError) or refused
    if place is None and not explained:
        if aloud:
            traceback.print_exception(error)
        return
    where = ""
    if place is not None:
        log = LogFile(place)
        log.write("".join(traceback.format_exception(error)))
        log.close()
        where = f" The traceback is in {place}."
    if not aloud:
        return
    kind = "" if explained else f"{type(error).__name__}: "
    first = next(iter(str(error).strip().splitlines()), "")
    print(
        f"error: rank {rank}: {kind}{visible(first).rstrip('.')}.{where}",
        file=sys.stderr,
        flush=True,
    )


class LogFile(io.TextIOBase):
    """A log file that is created at the first write, and appended to; without a path, nothing is.

    Control characters are spelled out, because a data set's name may hold some, and a terminal that
    shows the log would obey them. A full disk cuts the log short, but does not end the run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stream: TextIO | None = None

    def write(self, text: str) -> int:
        if self._path is not None:
            try:
                if self._stream is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    # Line-buffered, because a forked data worker inherits what is in the buffer.
                    self._stream = self._path.open("a", buffering=1, encoding="utf-8")
                self._stream.write(visible(text, lines=True))
            except OSError:
                self._path = None  # nothing more is written
        return len(text)  # as if all were written: who prints must not fail

    def close(self) -> None:
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError:
                self._stream = None
        super().close()


class AboveProgress:
    """Standard error on a terminal whose last line may be any process's progress bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        # A line that has begun has cleared the bar already.
        self._stream.write((CLEAR_LINE if self._at_start else "") + text)
        self._at_start = text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _logging_to(file: LogFile, errors: Any, rank: int) -> Iterator[None]:
    """Log to the file, and warnings to standard error too; libraries' on the first rank alone."""
    record = logging.StreamHandler(file)
    record.setLevel(logging.INFO)
    show = logging.StreamHandler(errors)
    show.setLevel(logging.WARNING)
    show.addFilter(_UsefulRecords(rank))
    show.setFormatter(_OneLine())
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [record, show]
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", _log_warning):
            for kind in _FOR_DEVELOPERS:
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def _log_warning(message: Warning | str, *_: Any) -> None:
    """Log a Python warning, without its place in a library."""
    logging.getLogger("py.warnings").warning("%s", message)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"warning: {visible(record.getMessage().strip())}"


class _UsefulRecords(logging.Filter):
    """Passes our records; a library's only on the first rank, once, and if of use to the user."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name.startswith(OWN):
            return True
        if self._rank or text in self._shown:
            return False
        self._shown.add(text)
        return not any(known in text for known in _OF_NO_USE)


def loss_name(numbers: Collection[str]) -> str | None:
    """Return the log's name of the loss that the run minimises; None: it has no such name."""
    return next((name for name in logged_names() if name in numbers), None)


class RunProgress:
    """Shows steps, loss, speed and the time left: on the last rank alone, which knows the loss."""

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
        parts = [f"{name} {text}" for name, text in _short_numbers(numbers)]
        if "tokens/s" in numbers:
            parts.append(f"{numbers['tokens/s']:,.0f} tokens/s")
        if step > at[0]:
            parts.append(f"{(now - at[1]) / (step - at[0]):.3g} s/step")
            parts.append(f"{self._time_left(step, now)} left")
            self._last = step, now
        if self._screen.is_terminal:
            self._update_bar(numbers="  ".join(parts))
        else:
            self.say("  ".join([f"step {step}/{self._total}", *parts]))

    def say(self, text: str) -> None:
        """Print `text` on a line of its own."""
        if self._screen is not None:
            self._screen.print(visible(text), markup=False, soft_wrap=True)

    def _time_left(self, step: int, now: float) -> timedelta:
        """Return the time left at this run's mean pace, which includes saving and validation."""
        assert self._first is not None
        first, since = self._first
        pace = (now - since) / (step - first)
        return timedelta(seconds=round(pace * (self._total - step)))

    def _update_bar(self, **change: object) -> None:
        """Draw the bar with `change`; the first call makes it."""
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


def _short_numbers(numbers: Mapping[str, float | None]) -> list[tuple[str, str]]:
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
