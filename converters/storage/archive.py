"""One tensor as ``torch.save`` stores it, written and read as a stream.

A ``.distcp`` file is such archives one after another. ``torch.save`` needs the whole tensor in
memory and checksums it at a quarter of a gigabyte a second; the archive is a plain, uncompressed
zip file, so it is written here chunk by chunk with `zipfile`. Reading finds the tensor's bytes in
the mapped file without copying them.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.restricted_pickle import FAILURES, Refused
from mcore_qwen3vl.converters.storage.tensor_pickle import (
    Described,
    ReadTensor,
    TensorUnpickler,
    dumps,
)

FOLDER = "archive"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can say: the bytes depend on nothing else


LARGEST_PICKLE = 2**16
"""Bytes of the pickle that describes one tensor; 150 are usual."""


class BadArchive(Exception):
    """The archive is damaged, or holds something else than was asked for."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


class Writable(Protocol):
    """What an archive is appended to: a binary file, or a `DirectFile`."""

    def write(self, data: Any, /) -> int: ...


def write_tensor(
    stream: Writable, dtype: torch.dtype, shape: Shape, chunks: Iterable[Tensor]
) -> None:
    """Append the archive of one contiguous tensor to `stream`.

    Args:
        stream: never sought.
        chunks: contiguous tensors of `dtype` whose memory, in order, is the tensor's.
    """
    write_archive(stream, Described(dtype, shape), [(prod(shape) * dtype.itemsize, chunks)])


def write_archive(
    stream: Writable, value: Any, storages: Iterable[tuple[int, Iterable[Tensor]]]
) -> None:
    """Append the archive of `value` to `stream`, as ``torch.save`` would write it.

    Args:
        stream: never sought.
        value: what the archive holds, with a `Described` for each tensor.
        storages: number of bytes and memory of the tensors, in the order of their `storage`.
    """
    with zipfile.ZipFile(_Unseekable(stream), "w") as archive:
        _add(archive, "data.pkl", [dumps(value)])
        _add(archive, "byteorder", [b"little"])
        for number, (size, chunks) in enumerate(storages):
            _add(archive, f"data/{number}", (as_bytes(chunk) for chunk in chunks), size)
        _add(archive, "version", [b"3\n"])


def read_tensor(view: memoryview) -> Tensor:
    """The tensor in an archive, sharing `view`'s memory.

    Everything is checked before use, since the archive may come from anywhere: the places of its
    parts against each other, the tensor's extent against the data that is there.

    Raises:
        BadArchive: the archive is damaged, or holds anything but one strided CPU tensor.
    """
    with _damage():
        archive = Archive(view)
        read = TensorUnpickler(archive.small("data.pkl", LARGEST_PICKLE)).load()
        if not isinstance(read, ReadTensor):
            raise BadArchive(f"it holds {type(read).__name__}, not a tensor")
        archive.check_byte_order()
        return read.over(archive.data(read.key))


class Archive:
    """The parts of an archive that is being read. Raises `BadArchive` where it is damaged."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        with _damage():
            self._zip = zipfile.ZipFile(_View(view))
            self._folder = self._zip.namelist()[0].split("/")[0]
        self._parts: dict[str, list[zipfile.ZipInfo]] = {}
        for part in self._zip.infolist():
            self._parts.setdefault(part.filename, []).append(part)

    def small(self, name: str, largest: int) -> bytes:
        """The content of a part of at most `largest` bytes; its checksum is compared."""
        part = self._part(name)
        if part.file_size > largest:
            raise BadArchive(f"{name} has {part.file_size} bytes")
        with _damage():
            return self._zip.read(part)

    def data(self, key: str) -> memoryview:
        """The memory of a tensor, uncopied; its checksum is not compared."""
        part = self._part(f"data/{key}")
        with _damage():
            start = _data_start(self._view, part)
        return self._view[start : start + part.file_size]

    def check_byte_order(self) -> None:
        """Old archives do not state it; all machines were little-endian."""
        stated = any(name.endswith("/byteorder") for name in self._parts)
        if stated and self.small("byteorder", LARGEST_PICKLE) != b"little":
            raise BadArchive("it was written by a big-endian machine")

    def check(self) -> None:
        """Check that all parts are whole and lie where the directory puts them; data is not read.

        Each part's own header could put it elsewhere.
        """
        for name, parts in self._parts.items():
            if len(parts) != 1:
                raise BadArchive("two parts have one name")
            if parts[0].compress_type != zipfile.ZIP_STORED:
                raise BadArchive(f"{name} is compressed")
            with _damage():
                _data_start(self._view, parts[0])
                if "/data/" not in name:
                    self._zip.read(parts[0])  # and compares its checksum

    def _part(self, name: str) -> zipfile.ZipInfo:
        found = self._parts.get(f"{self._folder}/{name}", [])
        if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
            raise BadArchive(f"it holds {len(found)} parts {name}, or a compressed one")
        return found[0]


@contextmanager
def _damage() -> Iterator[None]:
    """What reading a damaged archive may raise, as one exception."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, OSError, Refused, *FAILURES) as error:
        raise BadArchive(f"{error!r:.200}") from error


def _data_start(view: memoryview, part: zipfile.ZipInfo) -> int:
    """Where the bytes of `part` begin.

    A local header whose lengths are wrong would move the data by some bytes, so what comes right
    after it must be what a zip file has there.
    """
    at = part.header_offset
    name, extra = struct.unpack("<HH", view[at + 26 : at + 30])
    start = at + 30 + name + extra
    after = bytes(view[start + part.file_size : start + part.file_size + 8])
    if part.flag_bits & 8:
        sound = after == b"PK\7\x08" + struct.pack("<I", part.CRC)
    else:
        sound = after[:4] in (b"PK\3\4", b"PK\1\2")
    named = bytes(view[at + 30 : at + 30 + name]) == part.orig_filename.encode()
    if not (sound and named and view[at : at + 4] == b"PK\3\4"):
        raise BadArchive(f"the parts around {part.filename} do not fit together")
    return start


def _add(
    archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes | memoryview], size: int = 0
) -> None:
    info = zipfile.ZipInfo(f"{FOLDER}/{name}", EPOCH)
    with archive.open(info, "w", force_zip64=size >= 2**31) as entry:
        for chunk in chunks:
            entry.write(chunk)


class _Unseekable(io.RawIOBase):
    """Makes `zipfile` count offsets from here and put sizes after the data, not before it."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(data)
        return memoryview(data).nbytes


class _View(io.RawIOBase):
    """A read-only file over a memoryview, without copying it."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Never reserves more than there is, whatever `size` a damaged file asks for."""
        stop = len(self._view) if size is None or size < 0 else self._at + size
        part = bytes(self._view[self._at : stop])
        self._at += len(part)
        return part
