"""The reader of JSON files: an array of records, as LLaVA publishes them, or one record a line.

An index of the records' places is written once, beside the file's stand-in in the cache. By it, any
record can be read alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mcore_qwen3vl.data.readers.crude import crude_sample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write

_WINDOW = 1 << 24  # bytes parsed at a time
_BLANK = " \t\r\n"


def index_of(path: Path) -> Path:
    """Return the path of the index, beside `path`, which may be a stand-in.

    The index holds uint64 rows of (start, end), one a record, then the size of `path` twice.
    """
    return path.with_name(path.name + ".idx")


def is_json_indexed(path: Path) -> bool:
    """Return whether the index exists and is up to date with the file.

    Energon's index of a JSONL file may be asked for too: its last number is that file's size.
    """
    index = index_of(path)
    if not index.exists() or index.stat().st_mtime_ns < path.stat().st_mtime_ns:
        return False
    with index.open("rb") as stream:
        stream.seek(-8, os.SEEK_END)
        return int.from_bytes(stream.read(8), sys.byteorder) == path.stat().st_size


def write_index(path: Path, data: Path) -> None:
    """Write the index of a ``.json`` file, which stands for `data`.

    Raises:
        BadInput: the file is empty, or is neither an array nor one object a line.
        OSError: the folder cannot be written.
    """
    with path.open("rb") as file:
        first = _first_byte(file)
        file.seek(0)
        if first not in (b"", b"[", b"{"):
            raise BadInput(f"{data} is neither a JSON array nor one JSON object a line.")
        rows = list(_element_bounds(file, data) if first == b"[" else _line_bounds(file))
    if not rows:
        raise BadInput(f"The data set {data} is empty.")
    size = path.stat().st_size
    with atomic_write(index_of(path), remedy=None) as partial:
        # `tofile` would not report a full disk.
        partial.write_bytes(np.array([*rows, (size, size)], np.uint64).tobytes())


class JsonReader:
    """Random access to the records of a ``.json`` file, in the form of energon's readers."""

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._rows = np.memmap(index, np.uint64, "r").reshape(-1, 2)[:-1]
        self.counts = [len(self._rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        """Return the crude sample of one record, with its JSON not parsed yet."""
        start, end = (int(bound) for bound in self._rows[index])
        # pread, because forks share a file's position.
        text = os.pread(self._open_file.fileno(), end - start, start)
        return crude_sample(self._path, self._path.name, index, index, text)

    @cached_property
    def _open_file(self) -> BinaryIO:
        return self._path.open("rb")


def _first_byte(file: BinaryIO) -> bytes:
    while block := file.read(4096):
        if text := block.lstrip():
            return text[:1]
    return b""


def _line_bounds(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the lines that are not blank."""
    start = 0
    for line in file:
        if line.strip():
            yield start, start + len(line)
        start += len(line)


def _element_bounds(file: BinaryIO, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the bounds of an array's elements; as Latin-1, each byte is one character."""
    decoder = json.JSONDecoder()
    text, base, place, count, line = "", 0, 0, 0, 1  # `base` and `line`: where `text` begins
    before = "["
    while True:
        place = _skip_blanks(text, place)
        room = len(text) - place
        try:
            if not room:
                raise ValueError("the file ends within the array")
            if text[place] != before:
                if before == "," and text[place] == "]":
                    return
                raise ValueError(f"{before!r} is expected")
            start = _skip_blanks(text, place + 1)
            if before == "[" and text[start : start + 1] == "]":
                return
            _, end = decoder.raw_decode(text, start)
            # What ends where the text does may go on in the file, as a number does.
            if _skip_blanks(text, end) == len(text):
                raise ValueError("the file ends within the array")
        except RecursionError:
            raise BadInput(f"{path}: record {count + 1} is nested too deeply. Remove it.") from None
        except ValueError as error:
            # At least as much again, so that a large record is parsed only a few times.
            more = file.read(max(_WINDOW, room)).decode("latin-1")
            if not more:
                line += text[: _skip_blanks(text, min(place + 1, len(text)))].count("\n")
                reason = getattr(error, "msg", error)
                raise BadInput(
                    f"{path} is not a valid JSON array: record {count + 1}, from line {line}: "
                    f"{reason}. Write the file again, or write one record a line (.jsonl), "
                    "where a broken record is skipped."
                ) from error
            line += text[:place].count("\n")
            text, base, place = text[place:] + more, base + place, 0
            continue
        yield base + start, base + end
        place, before, count = end, ",", count + 1


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANK:
        place += 1
    return place
