"""Line numbers of the records in a JSONL file: a blank line is no record but counts as a line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from mcore_qwen3vl.data.loading.stand_in import origin
from mcore_qwen3vl.errors import BadInput


def blanks_of(path: Path) -> Path:
    """Return the path of the list of blank lines in `path`; without any, the file is absent."""
    return path.with_name(path.name + ".idx.blank")


def write_blanks(path: Path, blanks: Sequence[int]) -> None:
    """Write the list of a JSONL file's blank lines, or remove the file if there are none.

    Args:
        path: a JSONL file.
        blanks: for each blank line, the number of records before it; ascending.
    """
    if blanks:
        # `tofile` would not report a full disk.
        blanks_of(path).write_bytes(np.array(blanks, np.int64).tobytes())
    else:
        blanks_of(path).unlink(missing_ok=True)


def line_of(path: Path, record: int) -> int:
    """Return the line, from 1, of a record, from 0, in an indexed JSONL file."""
    return record + 1 + int(np.searchsorted(_blanks(path), record, side="right"))


def record_of(path: Path, line: int) -> int:
    """Return the record, from 0, on a line, from 1, of an indexed JSONL file.

    Raises:
        BadInput: the line is blank.
    """
    blanks = _blanks(path)
    # The n-th blank line, from 0, is line blanks[n] + n + 1.
    before = int(np.searchsorted(blanks + np.arange(len(blanks)) + 1, line))
    record = line - 1 - before
    if line_of(path, record) != line:
        raise BadInput(f"Line {line:,} of {origin(path)} is blank.")
    return record


def _blanks(path: Path) -> np.ndarray:
    try:
        written = os.stat(blanks_of(path)).st_mtime_ns
    except FileNotFoundError:
        return np.zeros(0, np.int64)
    return _read(blanks_of(path), written)


@cache
def _read(file: Path, written: int) -> np.ndarray:
    return np.fromfile(file, np.int64)
