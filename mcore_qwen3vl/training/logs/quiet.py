"""Keeps what Megatron prints, about a thousand lines a run, out of the terminal.

It goes to ``logs/rank_NNNNN.txt`` in the checkpoint directory instead. What a person wants to see
is shown by :mod:`mcore_qwen3vl.training.logs.summary` and
:mod:`mcore_qwen3vl.training.logs.progress`; warnings and errors reach standard error as ever.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from rich.console import Console
from tqdm import tqdm

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.training.arguments.refusal import StrictParser

FOLDER = "logs"
CLEAR_LINE = "\r\x1b[2K"
OWN = "mcore_qwen3vl"

_PYTHONS = re.compile(r"\S+:\d+: (?P<kind>\w+): (?P<text>.*)")
"""The first line of a warning by the module `warnings`: where, of which class, and what."""

_FOR_DEVELOPERS = ("DeprecationWarning", "FutureWarning", "SyntaxWarning")

_OF_NO_USE = (
    "RerunStateMachine",  # is in the mode that this package chooses
    "GPTModel IS DEPRECATED",  # advice for the author of a model
    "argument order of load has been changed",  # of a function that Megatron calls
    "assuming the intent is to load in a single process",  # of the states that all ranks share
    "async save is deprecated",  # saves are synchronous
    "'pin_memory' argument is set as true but no accelerator",  # --cpu was asked for
)
"""Parts of Megatron's and torch's warnings that every run would show."""


@contextmanager
def quiet(argv: Sequence[str]) -> Iterator[Console | None]:
    """Meanwhile, standard output is a log file.

    Args:
        argv: the command line; with ``--verbose`` nothing changes.

    Yields:
        The terminal, or wherever standard output led to; None with ``--verbose``.
    """
    if _flags(argv).verbose:
        yield None
        return
    rank = int(os.environ.get("RANK", "0"))
    file = LogFile(log_of(argv, rank))
    terminal = sys.stdout
    # Piped output is for files and grep: lines are not folded.
    screen = Console(file=terminal, highlight=False, width=None if terminal.isatty() else 1000)
    errors: Any = AboveProgress(sys.stderr) if terminal.isatty() else sys.stderr
    # A data worker fills its buffer behind a bar of its own, and all would draw over each other.
    no_bars = mock.patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True))
    with (
        redirect_stdout(file),
        redirect_stderr(errors),
        _logging_to(file, errors, rank),
        no_bars,
    ):
        yield screen
    file.close()


def log_of(argv: Sequence[str], rank: int) -> Path | None:
    """The log of a rank of this command line; None without ``--save``, or with ``--verbose``."""
    known = _flags(argv)
    return None if known.verbose or known.save is None else log_file(known.save, rank)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = StrictParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--save", type=Path)
    return parser.parse_known_args(list(argv))[0]


def log_file(save: Path, rank: int) -> Path:
    """Where a rank's output goes, below the checkpoint directory `save`."""
    return save / FOLDER / f"rank_{rank:05d}.txt"


class LogFile(io.TextIOBase):
    """Appends to a file that it makes when there is something to write.

    A run does not end for its log's sake: on a full disk the log is cut short.
    """

    def __init__(self, path: Path | None) -> None:
        """None: what is written is lost."""
        self._path = path
        self._stream: TextIO | None = None

    def write(self, text: str) -> int:
        if self._path is not None:
            try:
                if self._stream is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    # By lines: data workers are forked, with what is in the buffer.
                    self._stream = self._path.open("a", buffering=1, encoding="utf-8")
                self._stream.write(text)
            except OSError:
                self._path = None
        return len(text)

    def close(self) -> None:
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError:
                self._stream = None
        super().close()


class AboveProgress(io.TextIOBase):
    """Standard error on a terminal whose last line may be a progress bar, of any process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        self._stream.write((CLEAR_LINE if self._at_start else "") + text)
        self._at_start = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


@contextmanager
def _logging_to(file: LogFile, errors: Any, rank: int) -> Iterator[None]:
    """All records to the file; warnings to standard error too, others' from the first rank only."""
    record = logging.StreamHandler(file)
    record.setLevel(logging.INFO)
    show = logging.StreamHandler(errors)
    show.setLevel(logging.WARNING)
    show.addFilter(_OfUse(rank))
    show.setFormatter(_OneLine())
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [record, show]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before
        root.setLevel(level)


class _OneLine(logging.Formatter):
    """Formats a Python warning as its message alone, without the place in a library."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if found := _PYTHONS.match(text):
            text = found["text"]
        return f"warning: {visible(text.strip())}"


class _OfUse(logging.Filter):
    """Ours; a library's on the first rank, once, if it tells the user something about this run."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name.startswith(OWN):
            return True
        found = _PYTHONS.match(text)
        for_developers = found and found["kind"] in _FOR_DEVELOPERS
        if self._rank or for_developers or text in self._shown:
            return False
        self._shown.add(text)
        return not any(known in text for known in _OF_NO_USE)
