"""The terminal: progress and errors on standard error, results on standard output."""

from __future__ import annotations

import io
import json
import locale
import logging
import os
import re
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from mcore_qwen3vl.unused.fields import Unused, sentences

_SELDOM = 30.0  # seconds between lines that report progress
_PATIENCE = 1.0  # seconds of loading libraries in silence

json_was_written = ContextVar("json_was_written", default=False)
"""Whether this command has written its JSON result: a check that fails later writes no second."""

# Control characters, the separators of lines, and what changes the direction of writing.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NOT_OF_LINES = re.compile(rf"(?![\t\n]){_CONTROLS.pattern}")


def visible(text: str, *, lines: bool = False) -> str:
    """Return `text` with control characters spelled out (``\\x1b``): the terminal obeys none.

    A name, a path or an error is one line, whatever it holds: a line break in it would write a line
    of its own into a log. Text that may have several `lines` keeps its line breaks and tabs.
    """
    controls = _NOT_OF_LINES if lines else _CONTROLS
    return controls.sub(lambda character: ascii(character[0])[1:-1], text)


def plain(text: str, *, lines: bool = False) -> str:
    """Return `text` so that rich prints it literally, see `visible`."""
    return escape(visible(text, lines=lines))


def print_unused(unused: Iterable[Unused]) -> None:
    """Print, on standard error, what nothing uses of what the user gave: a line for each place."""
    for sentence in sentences(unused):
        messages.print(plain(sentence), soft_wrap=True)


def command_line() -> str:
    """Return the command line that is running, with the program's name without its folder."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


# Piped output goes to grep and files: names must not be wrapped at eighty columns.
output = Console(highlight=False, width=None if os.isatty(1) else 200)
messages = Console(stderr=True, highlight=False)


def prepare_standard_streams() -> None:
    """Prepare standard output and error for every locale, and for readers that leave.

    A closed stream, which a ``cron`` job may have, becomes ``/dev/null``. Text is read and written
    as UTF-8 whatever the locale, also in libraries and in child processes.
    A character that the terminal's encoding lacks is printed as ``\\xe9`` instead of failing. When
    the reader of a pipe leaves, as ``head`` does, the command goes on, and ends as it would have.
    """
    _open_closed_streams()
    if locale.getencoding().upper() != "UTF-8":
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        os.environ["PYTHONUTF8"] = "1"
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _wrap_to_outlive_its_reader(stream))


def _open_closed_streams() -> None:
    """Open ``/dev/null`` in place of a closed stream.

    Otherwise the next file that is opened would get its number, and whatever a library or a child
    process prints would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class _Outliving(io.FileIO):
    """A file descriptor that writes to ``/dev/null`` once nobody reads the pipe behind it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def _wrap_to_outlive_its_reader(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream for the same descriptor, buffered likewise, whose reader may leave."""
    stream.flush()
    raw = _Outliving(stream.fileno(), "wb", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def as_utf8(word: str) -> str:
    """Return a word of the command line as UTF-8, whatever the locale in which Python read it.

    Use it for text only: the file system needs paths as Python read them.
    """
    return os.fsencode(word).decode(errors="replace")


CountProgress = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]
"""``progress(title, total, what)``: :func:`count_progress`, or a function like it."""

ReportBytes = Callable[[int, int, str], None]
"""``report(bytes_done, bytes_total, name)``, as the converters call it."""


@contextmanager
def byte_progress(title: str, *, quiet: bool = False) -> Iterator[ReportBytes]:
    """Show a progress bar in bytes on standard error; nothing if that is not a terminal.

    The title is plain text, as in the functions below.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", style="dim", markup=False),
        console=messages,
        transient=True,
        disable=quiet or not messages.is_terminal,
    ) as bar:
        task = bar.add_task(plain(title), total=None, name="")
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, name=visible(name)
        )


class _RateColumn(ProgressColumn):
    """How many of a task are done in a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.1f} a second")


@contextmanager
def count_progress(title: str, total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(done)``, which shows on standard error how many of `total` are done.

    The rate and the time that is left are shown too. It updates in place on a terminal, and prints
    a line every half a minute elsewhere.
    """
    if not messages.is_terminal:
        began = said = time.monotonic()
        before: int | None = None  # done by an earlier run, which this one continues

        def say_seldom(done: int) -> None:
            nonlocal said, before
            before = done if before is None else before
            if (now := time.monotonic()) - said >= _SELDOM:
                said = now
                line = f"{title}: {done:,} of {total:,} {what}"
                if done > before:
                    rate = (done - before) / (now - began)
                    left = (total - done) / rate / 60
                    line += f", {rate:,.1f} a second, {left:,.0f} min left"
                messages.print(plain(line), soft_wrap=True)

        yield say_seldom
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[what]}"),
        _RateColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        auto_refresh=False,  # a refreshing thread could hold the terminal's lock as ranks fork
    ) as bar:
        task = bar.add_task(plain(title), total=total, what=what)
        yield lambda done: bar.update(task, completed=done, refresh=True)


@contextmanager
def no_progress(title: str, total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yield an ``advance(done)`` that shows nothing."""
    yield lambda done: None


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield ``say(text)``, which shows `text` on standard error: in place, or line by line."""
    if not messages.is_terminal:
        yield lambda text: messages.print(plain(f"{title}: {text}"), soft_wrap=True)
        return
    with messages.status(plain(title)) as status:
        yield lambda text: status.update(plain(f"{title}: {text}"))


@contextmanager
def name_slow_imports() -> Iterator[None]:
    """Say on a terminal which library is being loaded, if one is after the first second."""

    def name_library() -> None:
        if library := _library_being_imported(caller):
            messages.print(f"loading {library} and what belongs to it ...", style="dim")

    caller = threading.get_ident()
    timer = threading.Timer(_PATIENCE, name_library)
    timer.daemon = True
    if messages.is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _library_being_imported(thread: int) -> str | None:
    """Return the library whose import a thread is in: the outermost from outside this project."""
    frame = sys._current_frames().get(thread)
    library: str | None = None
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":  # of importlib
            name = str(frame.f_locals["name"]).partition(".")[0]
            # Frames come from the inside out, so the last one that counts is the outermost.
            library = library if name == "mcore_qwen3vl" else name
        frame = frame.f_back
    return library


def quiet_megatron() -> None:
    """Suppress what torch and megatron say to their own developers while they load.

    It is about Apex, deprecated names and the like. Other warnings of the program still show, and
    so do errors. A level that the program has set for their loggers stays.

    A training run lets them speak: a rank's log holds all of it, and
    :mod:`mcore_qwen3vl.training.logs.terminal` chooses which warnings the terminal shows.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
    for name in ("torch.utils.cpp_extension", "megatron"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def quiet_libraries() -> None:
    """Suppress the advice of every library in a command; errors still show.

    Call it before megatron is imported.
    """
    quiet_megatron()
    warnings.filterwarnings("ignore")
    # Megatron would print the notes of every library; only the first basicConfig() counts.
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def table(title: str, *columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a plain table; a column whose name starts with ``>`` is right-aligned.

    The title and the columns' names are plain text. Cells are rich markup: pass text from files and
    data to `plain` first.
    """
    made = Table(
        title=plain(title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        made.add_column(plain(column.lstrip(">")), justify=justify)
    for row in rows:
        made.add_row(*row)
    return made


def emit_json(data: Any) -> None:
    """Write `data` as JSON to standard output, which must hold nothing else.

    A dataclass becomes an object when its turn comes, and the text is not kept: a report has lists
    with an entry for each sample.
    """
    json_was_written.set(True)
    json.dump(data, sys.stdout, indent=2, default=_as_json)
    sys.stdout.write("\n")


def _as_json(value: Any) -> Any:
    """Return an object that JSON has no form for as a mapping of its fields, or as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def present(as_json: bool, data: Any, show: Callable[..., None], *shown: Any) -> None:
    """Write `data` as JSON if that was asked for; otherwise call `show` with `shown`."""
    if as_json:
        emit_json(data)
    else:
        show(*shown)


def say(text: str) -> None:
    """Print plain text to standard output, without wrapping it."""
    output.print(plain(text), soft_wrap=True)


def dimensions(shape: Iterable[int]) -> str:
    """Format a tensor's shape: ``64x32``."""
    return "x".join(map(str, shape))


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 image``, ``2 images``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Format a byte count for people: ``4.26 GB`` (powers of ten, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
