"""A ``.json`` file: an array of records, as LLaVA publishes them, or one record a line.

An index of the records' places is written once, beside the file's stand-in in the cache, so that
any record can be read alone.
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

from mcore_qwen3vl.data.loading.crude import crude_sample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import replacing

_WINDOW = 1 << 24  # bytes parsed at a time
_BLANK = " \t\r\n"


def index_of(path: Path) -> Path:
    """Return the path of the index, beside `path`, which may be a stand-in.

    The index holds uint64 rows of (start, end), one a record, then the size of `path` twice.
    """
    return path.with_name(path.name + ".idx")


def is_indexed(path: Path) -> bool:
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
        if first not in (b"[", b"{"):
            raise BadInput(
                f"The data set {data} is empty."
                if not first
                else f"{data} is neither a JSON array nor one JSON object a line."
            )
        rows = list(_lines(file) if first == b"{" else _elements(file, data))
    if not rows:
        raise BadInput(f"The data set {data} is empty.")
    size = path.stat().st_size
    with replacing(index_of(path)) as partial:
        # `tofile` would not report a full disk.
        partial.write_bytes(np.array([*rows, (size, size)], np.uint64).tobytes())


class JsonReader:
    """Random access to the records of a ``.json`` file, in the form of energon's readers."""

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._rows = np.memmap(index, np.uint64, "r").reshape(-1, 2)[:-1]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        """Return the crude sample of one record, with its JSON not parsed yet."""
        start, end = (int(bound) for bound in self._rows[index])
        text = os.pread(self._file.fileno(), end - start, start)  # forks share a file's position
        return crude_sample(self._path, self._path.name, index, index, text)

    @cached_property
    def _file(self) -> BinaryIO:
        return self._path.open("rb")


def _first_byte(file: BinaryIO) -> bytes:
    while block := file.read(4096):
        if found := block.lstrip():
            return found[:1]
    return b""


def _lines(file: BinaryIO) -> Iterator[tuple[int, int]]:
    start = 0
    for line in file:
        if line.strip():
            yield start, start + len(line)
        start += len(line)


def _elements(file: BinaryIO, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the bounds of an array's elements; as Latin-1, each byte is one character."""
    decoder = json.JSONDecoder()
    text, base, place, count = "", 0, 0, 0
    before = "["
    while True:
        place = _skip(text, place)
        room = len(text) - place
        try:
            if not room:
                raise ValueError("the file ends within the array")
            if text[place] != before:
                if before == "," and text[place] == "]":
                    return
                raise ValueError(f"{before!r} is expected")
            start = _skip(text, place + 1)
            if before == "[" and text[start : start + 1] == "]":
                return
            _, end = decoder.raw_decode(text, start)
            if _skip(text, end) == len(text):
                raise ValueError("the file ends within the array")
        except RecursionError:
            raise BadInput(f"{path}: record {count + 1} is nested too deeply. Remove it.") from None
        except ValueError as error:
            more = file.read(max(_WINDOW, room)).decode("latin-1")
            if not more:
                line = _line_of(path, base + _skip(text, min(place + 1, len(text))))
                reason = getattr(error, "msg", error)
                raise BadInput(
                    f"{path} is not a valid JSON array: record {count + 1}, from line {line}: "
                    f"{reason}. Write the file again, or write one record a line (.jsonl), "
                    "where a broken record is skipped."
                ) from error
            text, base, place = text[place:] + more, base + place, 0
            continue
        yield base + start, base + end
        place, before, count = end, ",", count + 1


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANK:
        place += 1
    return place


def _line_of(path: Path, offset: int) -> int:
    """Return the line, from 1, that holds the byte at `offset`."""
    line, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            line += block.count(b"\n")
            left -= len(block)
    return line
