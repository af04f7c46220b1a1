"""True values for integers and booleans on the device; floats hold whatever is in memory.

Lengths, indices, masks, splits and ``nonzero`` are then what they would be on a GPU, and so are the
shapes that follow from them. Comparisons of floats are false, and top-k takes the columns in turn,
so that routing is balanced. With skewed routing every other row chooses only among the first
quarter of the columns, so that an expert there sees 2.5 times its share. A float that the host
reads is at least 0, so that no square root fails on what happened to be in memory.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from .device import Routing

aten = torch.ops.aten
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST = 1 << 23  # elements; larger tensors are not worth the host's time
_UNTOUCHED = {  # allocate only, or work without a kernel
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.record_stream.default,
    aten._local_scalar_dense.default,
    aten.is_pinned.default,
    aten._pin_memory.default,
    aten.set_.source_Storage_storage_offset,
    aten.bincount.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.prod.dim_int,
    aten.masked_select.default,
}
_EXCHANGES = ("c10d", "_c10d_functional")
"""Namespaces of collectives, which no host computes alone."""
_IN_TURN = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default}


class TrueIntegers(TorchDispatchMode):
    """A mode that computes integer results of device operators on the host, into their memory."""

    def __init__(self, routing: Routing = "uniform") -> None:
        super().__init__()
        self._routing = routing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and isinstance(result, float):
            # A value that was on the host is true; one from the device must only be usable.
            true = not args[0].is_cuda or (result >= 0 and math.isfinite(result))
            return result if true else 0.0
        if func in _UNTOUCHED or func.is_view or not _computes_on_host(func, (args, kwargs)):
            return result
        self._fill_whole_numbers(func, args, kwargs, result)
        return result

    def _fill_whole_numbers(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the integers and booleans of `result` their values.

        Indices of the largest floats, as a router takes them, go through the columns in turn. What
        else depends on floats is zero. What depends on integers alone is computed on the host.
        """
        outputs = [t for t in _as_sequence(result) if _is_filled(t)]
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        if not outputs or not any(t.is_cuda for t in (*outputs, *inputs)):
            return
        mutates = func._schema.is_mutable
        if func in _IN_TURN and inputs[0].is_floating_point():
            indices = _as_sequence(result)[-1]
            chosen = _columns_in_turn(indices.shape, inputs[0].shape[-1], self._routing)
            host_view(indices).copy_(chosen)
        elif any(t.is_floating_point() for t in inputs):
            if not mutates:  # a tensor that is changed keeps what it has
                for output in outputs:
                    host_view(output).zero_()
        elif all(t.numel() <= _LARGEST for t in inputs):
            # The result on the host is only copied from, so it need not be pinned.
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            true = func(*tree_map(_to_host, args), **tree_map(_to_host, kwargs))
            if mutates:
                return  # `true` is in that memory already, because `_to_host` gives views
            for output, value in zip(_as_sequence(result), _as_sequence(true), strict=True):
                if _is_filled(output) and output.shape == value.shape:
                    host_view(output).copy_(value)


def _computes_on_host(func: Any, arguments: Any) -> bool:
    """Return whether the host knows what an operator gives: PyTorch's own, or a library's.

    A library's operator on integers alone is computed by its kernel for the CPU, if it has one.
    """
    if func.namespace == "aten":
        return True
    tensors = (value for value in tree_iter(arguments) if isinstance(value, Tensor))
    return (
        func.namespace not in _EXCHANGES
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
        and all(tensor.dtype in WHOLE for tensor in tensors)
    )


def _columns_in_turn(shape: torch.Size, columns: int, routing: Routing) -> Tensor:
    """Return indices (..., k): row r takes columns r * k, r * k + 1, … modulo their number.

    With skewed routing, even and odd rows count separately, and odd rows take theirs modulo a
    quarter of the number (or k, if that is more).
    """
    width = shape[-1]
    rows, slots = torch.arange(shape.numel() // width)[:, None], torch.arange(width)
    if routing == "uniform":
        return ((rows * width + slots) % columns).view(shape)
    in_turn = rows // 2 * width + slots
    few = max(columns // 4, width)
    return torch.where(rows % 2 == 1, in_turn % few, in_turn % columns).view(shape)


def _is_filled(value: Any) -> bool:
    """Return whether it is a tensor of integers or booleans that is not too large to fill in."""
    return isinstance(value, Tensor) and value.dtype in WHOLE and value.numel() <= _LARGEST


def _as_sequence(value: Any) -> Any:
    """Return the results of an operator, which may be one or several."""
    return value if isinstance(value, tuple | list) else [value]


def host_view(tensor: Tensor) -> Tensor:
    """Return a CPU tensor in the memory of a device tensor, which is really host memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    count = storage.nbytes() // tensor.element_size()
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=count)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _to_host(value: Any) -> Any:
    """Return an operator's argument for the host: a view of the same memory, or the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return host_view(value) if isinstance(value, Tensor) and value.is_cuda else value


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a device tensor with these values, if they are integers or booleans."""
    result = torch.empty_like(values, device=device)
    if result.dtype in WHOLE:
        host_view(result).copy_(values)
    return result


def _nonzero(self: Tensor) -> Tensor:
    """Synchronize as CUDA does, because the host must know the size of the result."""
    torch.cuda.current_stream().synchronize()
    if self.dtype in WHOLE:
        return _to_device(host_view(self).nonzero(), self.device)
    return _to_device(torch.empty(0, self.ndim, dtype=torch.int64), self.device)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Synchronize as CUDA does: without `output_size`, the host must learn the sum of `repeats`."""
    if output_size is None:
        torch.cuda.current_stream().synchronize()
    return _to_device(torch.repeat_interleave(host_view(repeats)), repeats.device)


def _bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Synchronize as CUDA does, because the host must know the size of the result."""
    torch.cuda.current_stream().synchronize()
    counts = torch.bincount(host_view(self), minlength=minlength)
    return _to_device(counts if weights is None else counts.double(), self.device)


def _prod(
    self: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the product on the host: for integers CUDA compiles a kernel, impossible here."""
    return _to_device(host_view(self).prod(dim, keepdim, dtype=dtype), self.device)


@cache  # what is registered lasts as long as the library
def answer_sizes_from_host() -> torch.library.Library:
    """Answer from the host the operators that depend on kernels' results, such as ``nonzero``."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("bincount", _bincount, "CUDA")
    library.impl("nonzero", _nonzero, "CUDA")
    library.impl("prod.dim_int", _prod, "CUDA")
    library.impl("repeat_interleave.Tensor", _repeat_interleave, "CUDA")
    return library
