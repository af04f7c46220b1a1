"""What an adapter adds to a weight: s·B·A in float32.

It is within the rounding of float32 of what PEFT adds, and has other bits: those of a product
depend on the processor, the library, the number of rows and where the operands lie in memory. PEFT
multiplies whole weights; for the experts of one layer of 235B that would be 6.4 GB at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.storage.dtypes import cast

CHUNK_VALUES = 2**20
"""Values of a product made at a time: it stays in the processor's cache until it is written."""


def product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """s·B·A in float32: (out, in) from (r, in) and (out, r)."""
    return (b.float() @ a.float()).mul_(scaling)


def of_expert(factors: Factors, index: int) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r) of one of the fused experts."""
    rows = slice(index * factors.r, (index + 1) * factors.r)
    experts = factors.a.shape[0] // factors.r
    return factors.a[rows], factors.b[:, index::experts]


def row_chunks(count: int, width: int = 1) -> Iterator[slice]:
    """Rows 0 to `count` in pieces of about `CHUNK_VALUES`."""
    pieces = min(-(-count * width // CHUNK_VALUES), count)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)


@torch.no_grad()
def add_update(weight: Tensor, factors: Factors, name: str, *, swapped: bool) -> None:
    """Merge in place, rounding to the weight's dtype once.

    Args:
        weight: of a linear (out, in), or of fused experts (E, out, in).
        factors: on the same device.
        name: for the message.
        swapped: experts are (E, in, out), as published.

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
