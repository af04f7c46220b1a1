"""The B factors of fused tensors as one matrix, whose rows are those of the fused linear.

``linear_qkv`` interleaves q, k and v by KV group. We put their B factors, of shapes (out_i, r_i),
into one (rows, r_1 + r_2 + r_3) matrix that is zero outside of its blocks. One product then gives
the interleaved output, and nothing as large as an activation is rearranged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The places of the factors' rows among those of the fused linear.

    Attributes:
        rows: number of rows of the fused linear, on this rank.
        shapes: (out_i, r_i) of each factor, on this rank.
        placed: for each run of rows: its first row in the fused linear, the number of the factor,
            its first row in the factor, and its length.
    """

    rows: int
    shapes: tuple[tuple[int, int], ...]
    placed: tuple[tuple[int, int, int, int], ...]

    @property
    def plain(self) -> bool:
        """Whether there is one factor, which covers all rows of the linear."""
        return len(self.shapes) == 1 and self.placed == ((0, 0, 0, self.rows),)

    def matrix(self, factors: Sequence[Tensor]) -> Tensor:
        """Assemble the (rows, sum of r_i) matrix; differentiable."""
        if self.plain:
            return factors[0]
        return _Assemble.apply(self, *factors)


@lru_cache(maxsize=64)  # all layers are alike
def _indices(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Map each value of the matrix to its place among the factors' values, and back.

    The factors' values lie one factor after another, followed by a zero for all other places.
    """
    width = sum(rank for _, rank in blocks.shapes)
    sizes = [rows * rank for rows, rank in blocks.shapes]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    columns = [sum(rank for _, rank in blocks.shapes[:n]) for n in range(len(blocks.shapes))]
    forward = torch.full((blocks.rows, width), sum(sizes), dtype=torch.int32)
    for row, number, first, count in blocks.placed:
        rank = blocks.shapes[number][1]
        start = starts[number] + first * rank
        values = torch.arange(start, start + count * rank, dtype=torch.int32).view(count, rank)
        forward[row : row + count, columns[number] : columns[number] + rank] = values
    inverse = torch.empty(sum(sizes) + 1, dtype=torch.int32)
    inverse[forward.flatten().long()] = torch.arange(forward.numel(), dtype=torch.int32)
    return forward.flatten().to(device), inverse[:-1].to(device)


class _Assemble(torch.autograd.Function):
    """Assembles the matrix with two kernels in each direction.

    The backward of plain indexing would add up the gradients of all zeros one by one.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, *factors: Tensor) -> Tensor:
        ctx.blocks = blocks
        forward, _ = _indices(blocks, factors[0].device)
        values = torch.cat([*(f.flatten() for f in factors), factors[0].new_zeros(1)])
        return values.index_select(0, forward).view(blocks.rows, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        blocks = ctx.blocks
        _, inverse = _indices(blocks, gradient.device)
        values = gradient.reshape(-1).index_select(0, inverse)
        parts = values.split([rows * rank for rows, rank in blocks.shapes])
        return None, *(p.view(s) for p, s in zip(parts, blocks.shapes, strict=True))
