"""Write large files with direct I/O, from any offset and in pieces of any size.

A buffered write fills pages that nothing reads again and that evict useful ones. Writing and
syncing 400 MB costs 0.05 s of processor time with direct I/O and 0.34 s buffered (0.13 to 0.58;
five interleaved pairs), and takes a third of the time. Converting a cut 2B of 2.1 GB to Megatron
takes 7.4 s of processor time (10.8 s buffered), and back 5.1 s (8.4 s).

Whole blocks are written directly from an aligned buffer. The bytes before the first and after the
last whole block are written buffered; so is everything where the file system has no direct I/O.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any, Self

BLOCK = 4096
"""Alignment in bytes; disks and file systems with direct I/O accept it."""

BUFFER_BYTES = 8 * 2**20


class DirectFile:
    """A file being written; use it as a context manager.

    Several writers may write to one file at once, each its own range: a block that two ranges share
    is written buffered by both.

    Args:
        path: the file.
        create: whether to begin a new, empty file. Otherwise `path` must exist and keeps the bytes
            that are not overwritten.

    Raises:
        OSError: any method failed, as the system reports it.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._plain = os.open(path, flags | (os.O_CREAT | os.O_TRUNC if create else 0), 0o666)
        self._direct = _open_direct(path, flags)
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        self._base = 0  # file offset of the buffer's first byte; a multiple of BLOCK
        self._first = self._last = 0  # start and end of the data in the buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._plain, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def tell(self) -> int:
        return self._base + self._last

    def seek(self, offset: int) -> None:
        """Continue writing at `offset`."""
        if offset == self.tell():
            return
        self._flush()
        self._base, self._first = offset - offset % BLOCK, offset % BLOCK
        self._last = self._first

    def write(self, data: Any) -> int:
        """Write all of `data`, a bytes-like object; return its number of bytes."""
        left = memoryview(data).cast("B")
        while left:
            piece = left[: BUFFER_BYTES - self._last]
            self._buffer[self._last : self._last + len(piece)] = piece
            self._last += len(piece)
            left = left[len(piece) :]
            if self._last == BUFFER_BYTES:
                self._flush()
        return memoryview(data).nbytes

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._flush()
        os.fsync(self._plain)

    def _flush(self) -> None:
        """Write the buffer's data to the file and empty the buffer; the position stays."""
        first, last = self._first, self._last
        head = min(first + -first % BLOCK, last)
        tail = max(last - last % BLOCK, head)
        with memoryview(self._buffer) as buffer:
            _write_all(self._plain, buffer[first:head], self._base + first)
            self._write_blocks(buffer[head:tail], self._base + head)
            _write_all(self._plain, buffer[tail:last], self._base + tail)
        at = self._base + last
        self._base, self._first = at - at % BLOCK, at % BLOCK
        self._last = self._first

    def _write_blocks(self, blocks: memoryview, offset: int) -> None:
        if self._direct is not None and blocks:
            try:
                written = os.pwrite(self._direct, blocks, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # stricter alignment needed, or no direct I/O
                    raise
                written = 0
                os.close(self._direct)
                self._direct = None
            blocks, offset = blocks[written:], offset + written
        _write_all(self._plain, blocks, offset)


def _open_direct(path: Path, flags: int) -> int | None:
    if not hasattr(os, "O_DIRECT"):  # macOS
        return None
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return None


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; one call of `os.pwrite` may write less."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
