"""One tensor as ``torch.save`` stores it, written and read as a stream.

A ``.distcp`` file is such archives one after another. ``torch.save`` needs the whole tensor in
memory and checksums it at a quarter of a gigabyte a second; the archive is a plain, uncompressed
zip file, so it is written here chunk by chunk with `zipfile`. Reading finds the tensor's bytes in
the mapped file without copying them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.restricted_pickle import (
    FAILURES,
    RestrictedUnpickler,
    make_ordered_dict,
    make_tuple,
)

STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
}
"""The dtypes a checkpoint may hold, with the classes that stand for them in torch's pickles."""

FOLDER = "archive"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can say: the bytes depend on nothing else


LARGEST_PICKLE = 2**16
"""Bytes of the pickle that describes one tensor; 150 are usual."""


class NotATensor(Exception):
    """The archive is damaged or holds something else than one CPU tensor of a model's dtypes."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_tensor(
    stream: BinaryIO, dtype: torch.dtype, shape: Shape, chunks: Iterable[Tensor]
) -> None:
    """Append the archive of one contiguous tensor to `stream`.

    Args:
        stream: anything with ``write``; never sought.
        chunks: contiguous tensors of `dtype` whose memory, in order, is the tensor's.
    """
    write_archive(stream, Described(dtype, shape), [(prod(shape) * dtype.itemsize, chunks)])


def write_archive(
    stream: BinaryIO, value: Any, storages: Iterable[tuple[int, Iterable[Tensor]]]
) -> None:
    """Append the archive of `value` to `stream`, as ``torch.save`` would write it.

    Args:
        stream: anything with ``write``; never sought.
        value: what the archive holds, with a `Described` for each tensor.
        storages: number of bytes and memory of the tensors, in the order of their `storage`.
    """
    with zipfile.ZipFile(_Unseekable(stream), "w") as archive:
        _add(archive, "data.pkl", [_pickled(value)])
        _add(archive, "byteorder", [b"little"])
        for number, (size, chunks) in enumerate(storages):
            _add(archive, f"data/{number}", (as_bytes(chunk) for chunk in chunks), size)
        _add(archive, "version", [b"3\n"])


def read_tensor(view: memoryview) -> Tensor:
    """The tensor in an archive, sharing `view`'s memory.

    Everything is checked before use, since the archive may come from anywhere: the places of its
    parts against each other, the tensor's extent against the data that is there.

    Raises:
        NotATensor: the archive is damaged, or holds anything but one strided CPU tensor.
    """
    try:
        with zipfile.ZipFile(_View(view)) as archive:
            described = _TensorUnpickler(_small_part(archive, "data.pkl")).load()
            if not isinstance(described, _Read):
                raise NotATensor(f"it holds {type(described).__name__}, not a tensor")
            if _small_part(archive, "byteorder", default=b"little") != b"little":
                raise NotATensor("it was written by a big-endian machine")
            data = _part(archive, f"data/{described.key}")
        start = _data_start(view, data)
    except (zipfile.BadZipFile, zlib.error, OSError, *FAILURES) as error:
        raise NotATensor(f"{error!r:.200}") from error
    return described.tensor(view[start : start + data.file_size])


def check_archive(view: memoryview) -> None:
    """Check that the parts of an archive are whole and lie where its directory puts them.

    ``torch.load`` of a mapped file trusts each part's own header and reads no checksum. The data of
    tensors is not read here either.

    Raises:
        NotATensor: the archive is damaged.
    """
    try:
        with zipfile.ZipFile(_View(view)) as archive:
            parts = archive.infolist()
            if len({part.filename for part in parts}) != len(parts):
                raise NotATensor("two parts have one name")
            for part in parts:
                if part.compress_type != zipfile.ZIP_STORED:
                    raise NotATensor(f"{part.filename} is compressed")
                _data_start(view, part)
                if "/data/" not in part.filename:
                    archive.read(part)  # and compares its checksum
    except (zipfile.BadZipFile, zlib.error, OSError, *FAILURES) as error:
        raise NotATensor(f"{error!r:.200}") from error


def _part(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    folder = archive.namelist()[0].split("/")[0]
    found = [info for info in archive.infolist() if info.filename == f"{folder}/{name}"]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise NotATensor(f"it holds {len(found)} parts {name}, or a compressed one")
    return found[0]


def _small_part(archive: zipfile.ZipFile, name: str, default: bytes | None = None) -> bytes:
    if default is not None and not any(n.endswith(f"/{name}") for n in archive.namelist()):
        return default
    part = _part(archive, name)
    if part.file_size > LARGEST_PICKLE:
        raise NotATensor(f"{name} has {part.file_size} bytes")
    return archive.read(part)


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
        raise NotATensor(f"the parts around {part.filename} do not fit together")
    return start


def tensor_pickle(dtype: torch.dtype, shape: Shape) -> bytes:
    """What ``torch.save`` puts in ``data.pkl`` for a contiguous CPU tensor."""
    return _pickled(Described(dtype, shape))


@dataclass(frozen=True)
class Described:
    """Pickles as the contiguous CPU tensor that it describes, whose memory is outside the pickle.

    Attributes:
        dtype, shape: the tensor's.
        storage: number of its memory in the archive.
    """

    dtype: torch.dtype
    shape: Shape
    storage: int = 0

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        memory = _Storage(self.dtype, prod(self.shape), self.storage)
        stride = contiguous_stride(self.shape)
        return torch._utils._rebuild_tensor_v2, (
            memory,
            0,
            tuple(self.shape),
            stride,
            False,
            OrderedDict(),
        )


@dataclass(frozen=True)
class _Storage:
    """Stands for a tensor's memory."""

    dtype: torch.dtype
    count: int
    number: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", STORAGES[obj.dtype], str(obj.number), "cpu", obj.count)
        return None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


DTYPE_OF = {f"{storage.__module__}.{storage.__name__}": d for d, storage in STORAGES.items()}


@dataclass(frozen=True)
class _Read:
    """What the pickle says of a tensor."""

    dtype: torch.dtype
    key: str
    count: int
    offset: int
    shape: Shape
    stride: Shape

    def tensor(self, data: memoryview) -> Tensor:
        """Over `data`, the bytes of the storage."""
        if len(data) != self.count * self.dtype.itemsize:
            raise NotATensor(f"{len(data)} bytes of data for {self.count} values")
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        whole = torch.frombuffer(data, dtype=self.dtype, count=self.count)
        return whole.as_strided(self.shape, self.stride, self.offset)


class _TensorUnpickler(RestrictedUnpickler):
    """Reads the description of one tensor and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (dtype := DTYPE_OF.get(f"{module}.{name}")) is not None:
            return dtype
        if (function := FUNCTIONS.get(f"{module}.{name}")) is not None:
            return function
        raise pickle.UnpicklingError(f"{module}.{name} in a tensor's archive")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        _, dtype, key, _, count = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not key.isdigit():
            raise pickle.UnpicklingError("not a plain storage")
        return dtype, key, count


def _describe(
    storage: tuple[torch.dtype, str, int], offset: int, size: Any, stride: Any, *_: Any
) -> _Read:
    dtype, key, count = storage
    numbers = (count, offset, *size, *stride)
    if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise pickle.UnpicklingError("a size that is not a count")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) > count or last >= max(count, 1):
        raise pickle.UnpicklingError("the tensor is larger than its data")
    return _Read(dtype, key, count, offset, tuple(size), tuple(stride))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _describe,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "collections.OrderedDict": make_ordered_dict,
    "torch.Size": make_tuple,
}


def contiguous_stride(shape: Shape) -> Shape:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _add(
    archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes | memoryview], size: int = 0
) -> None:
    info = zipfile.ZipInfo(f"{FOLDER}/{name}", EPOCH)
    with archive.open(info, "w", force_zip64=size >= 2**31) as entry:
        for chunk in chunks:
            entry.write(chunk)


class _Unseekable(io.RawIOBase):
    """Makes `zipfile` count offsets from here and put sizes after the data, not before it."""

    def __init__(self, stream: BinaryIO) -> None:
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
