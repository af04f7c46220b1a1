"""The update that an adapter adds to a weight: s·B·A in float32.

It equals what PEFT adds within float32 rounding, but not bit for bit: the bits of a product depend
on the processor, the library, the number of rows and where the operands lie in memory. PEFT
multiplies whole weights, which would take 6.4 GB for the experts of one layer of the 235B model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.storage.dtypes import cast

CHUNK_VALUES = 2**20
"""Values of a product computed at a time, which stay in the processor's cache until written."""


def product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute s·B·A in float32: (out, in) from (r, in) and (out, r)."""
    return (b.float() @ a.float()).mul_(scaling)


def of_expert(factors: Factors, index: int) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of one of the fused experts."""
    rows = slice(index * factors.r, (index + 1) * factors.r)
    experts = factors.a.shape[0] // factors.r
    return factors.a[rows], factors.b[:, index::experts]


def row_chunks(count: int, width: int = 1) -> Iterator[slice]:
    """Split rows 0 to `count`, of `width` values each, into pieces of about `CHUNK_VALUES`."""
    pieces = min(-(-count * width // CHUNK_VALUES), count)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)


@torch.no_grad()
def add_update(weight: Tensor, factors: Factors, name: str, *, swapped: bool) -> None:
    """Add s·B·A to a weight in place, rounding once to the weight's dtype.

    Args:
        weight: weight of a linear layer, (out, in), or of fused experts, (E, out, in).
        swapped: whether experts are (E, in, out), as published.

    Raises:
        BadInput: a sum is too large for the weight's dtype.
    """
    if weight.ndim == 3:
        for index, whole in enumerate(weight):
            one = whole.T if swapped else whole
            one.copy_(_sum(one, *of_expert(factors, index), factors.scaling, name))
        return
    for rows in row_chunks(*weight.shape):
        part = weight[rows]
        part.copy_(_sum(part, factors.a, factors.b[rows], factors.scaling, name))


def _sum(weight: Tensor, a: Tensor, b: Tensor, scaling: float, name: str) -> Tensor:
    return cast(product(a, b, scaling).add_(weight.float()), weight.dtype, name)
