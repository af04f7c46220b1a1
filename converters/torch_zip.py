"""One tensor as ``torch.save`` stores it, written and read as a stream.

A ``.distcp`` file is such archives one after another. ``torch.save`` needs the whole tensor in
memory and checksums it at a quarter of a gigabyte a second; the archive is a plain, uncompressed
zip file, so it is written here chunk by chunk with `zipfile`. Reading finds the tensor's bytes in
the mapped file without copying them.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping import Shape

STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
}
"""The dtypes a checkpoint may hold, with the classes that stand for them in torch's pickles."""

FOLDER = "archive"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can say: the bytes depend on nothing else


class NotAPlainTensor(Exception):
    """The archive holds something else than one contiguous tensor."""


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

    Raises:
        NotAPlainTensor: the archive is damaged, or holds more than one contiguous CPU tensor.
    """
    try:
        with zipfile.ZipFile(_View(view)) as archive:
            folder = archive.namelist()[0].split("/")[0]
            unpickler = _TensorUnpickler(io.BytesIO(archive.read(f"{folder}/data.pkl")))
            dtype, key, shape = unpickler.load()
            data = archive.getinfo(f"{folder}/data/{key}")
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        LookupError,
        ValueError,
        TypeError,
    ) as error:
        raise NotAPlainTensor(str(error)) from error
    except (EOFError, AttributeError, NotImplementedError, RuntimeError, OSError) as error:
        raise NotAPlainTensor(str(error)) from error
    header = view[data.header_offset : data.header_offset + 30]
    if len(header) < 30 or data.compress_type != zipfile.ZIP_STORED:
        raise NotAPlainTensor("the tensor data is compressed or cut short")
    start = (
        data.header_offset + 30 + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    )
    count = prod(shape)
    if data.file_size != count * dtype.itemsize or start + data.file_size > len(view):
        raise NotAPlainTensor(f"{data.file_size} bytes of data for shape {list(shape)}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start).view(shape)


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


class _TensorUnpickler(pickle.Unpickler):
    """Reads one contiguous tensor's description and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (dtype := DTYPE_OF.get(f"{module}.{name}")) is not None:
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} in a tensor's archive")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        _, dtype, key, _, count = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("not a plain storage")
        return dtype, key, count


def _describe(
    storage: tuple[torch.dtype, str, int], offset: int, size: Any, stride: Any, *_: Any
) -> tuple[torch.dtype, str, Shape]:
    dtype, key, count = storage
    shape = tuple(size)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("a size that is not a count")
    plain = offset == 0 and count == prod(shape) and tuple(stride) == contiguous_stride(shape)
    if not plain:
        raise pickle.UnpicklingError("the tensor is a view of a larger or permuted storage")
    return dtype, key, shape


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

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
