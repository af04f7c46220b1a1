"""Sums of what the programs of a kernel have each added up, in an order that does not change.

The parts are small beside what those programs read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64
ROWS = 64


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    parts,
    sums,
    count,
    columns,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts += tl.program_id(1) * count * columns
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < columns)[None, :]
        places = row[:, None] * columns + column[None, :]
        total += tl.sum(tl.load(parts + places, mask=inside, other=0.0), 0)
    places = tl.program_id(1) * columns + column
    tl.store(sums + places, total.to(sums.dtype.element_ty), mask=column < columns)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums (k, C) in `dtype` of k times n parts (k, n, C) float32, in one launch."""
    kinds, count, columns = parts.shape
    sums = parts.new_empty(kinds, columns, dtype=dtype)
    grid = triton.cdiv(columns, COLUMNS), kinds
    _sum_parts[grid](parts, sums, count, columns, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=4)
    return sums
