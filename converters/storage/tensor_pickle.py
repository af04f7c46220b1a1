"""Read and write torch's pickled descriptions of tensors, whose data lies outside the pickle."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.restricted_pickle import (
    Refused,
    RestrictedUnpickler,
    make_ordered_dict,
    make_tuple,
)

STORAGES: dict[torch.dtype, Any] = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
}
"""The classes that stand for a model's dtypes in torch's pickles."""


@dataclass(frozen=True)
class Described:
    """A stand-in that pickles as the contiguous CPU tensor that it describes, without its data.

    `storage` is the number of the tensor's storage in the archive.
    """

    dtype: torch.dtype
    shape: Shape
    storage: int = 0

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        memory = _Memory(self.dtype, str(self.storage), prod(self.shape))
        stride = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (memory, 0, tuple(self.shape), stride, False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments


class _Memory(NamedTuple):
    """A stand-in for a tensor's storage; `key` is its number in the archive."""

    dtype: torch.dtype
    key: str
    values: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Memory):
            return ("storage", STORAGES[obj.dtype], obj.key, "cpu", obj.values)
        return None


def dumps(value: Any) -> bytes:
    """Pickle `value`, which may hold `Described` tensors, as ``torch.save`` does."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True)
class ReadTensor:
    """A pickle's description of a tensor, checked to lie inside its storage.

    Attributes:
        key, nbytes: name of the storage in the archive, and its bytes.
        offset, shape, stride: place of the tensor in the storage, counted in values.
    """

    dtype: torch.dtype
    key: str
    nbytes: int
    offset: int
    shape: Shape
    stride: Shape

    def over(self, data: memoryview) -> Tensor:
        """Return the tensor, a view of its storage's `data`.

        Raises:
            UnpicklingError: the size of `data` is not what the pickle says.
        """
        if len(data) != self.nbytes:
            raise pickle.UnpicklingError(f"{len(data)} bytes of data instead of {self.nbytes}")
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).as_strided(
            self.shape, self.stride, self.offset
        )


class TensorUnpickler(RestrictedUnpickler):
    """An unpickler that admits only tensors; override `tensor` to replace them in the result.

    Raises:
        Refused: the pickle names something else.
    """

    def tensor(self, read: ReadTensor) -> Any:
        """Return what represents a tensor in the result."""
        return read

    def find_class(self, module: str, name: str) -> Any:
        functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._rebuild,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "collections.OrderedDict": make_ordered_dict,
            "torch.Size": make_tuple,
        }
        found = functions.get(f"{module}.{name}") or self.storage(module, name)
        if found is None:
            raise Refused(f"{module}.{name}")
        return found

    def storage(self, module: str, name: str) -> torch.dtype | None:
        """Return the dtype of the storage class of this name; None if it is not admitted."""
        return _DTYPES.get(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Memory:
        _, dtype, key, _, count = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not key.isdigit():
            raise pickle.UnpicklingError("not a plain storage")
        return _Memory(dtype, key, count)

    def _rebuild(self, memory: _Memory, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        dtype, key, count = memory
        numbers = (count, offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise pickle.UnpicklingError("a size that is not a count")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if prod(size) > count or last >= max(count, 1):
            raise pickle.UnpicklingError("the tensor is larger than its data")
        nbytes = count * dtype.itemsize
        return self.tensor(ReadTensor(dtype, key, nbytes, offset, tuple(size), tuple(stride)))


_DTYPES = {f"{storage.__module__}.{storage.__name__}": d for d, storage in STORAGES.items()}
