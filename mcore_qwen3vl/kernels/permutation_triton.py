"""Triton kernels of :mod:`mcore_qwen3vl.kernels.permutation`, where arguments are described.

The sums of n rows of b bytes for T tokens read n b bytes and write T b. With 8,192 tokens of 2,048
in bf16 and 8 experts each, that is 268 and 34 MB. Finding the order reads the table (T, E) twice,
2 MB for 128 experts, and writes four numbers a row. Zeroing writes what it zeroes.

The order takes two kernels. The first counts, for each block of tokens, those of each expert. A
program of the second adds up the counts of all blocks and of those before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

TILE = 2048
"""Entries of the table of tokens and experts that a program takes."""
BLOCKS = 16
"""Blocks of tokens whose counts a program adds up at a time."""
COLUMNS = 2048
"""Columns of a row that a program adds up."""
ZEROED = 8192
"""Values that a program sets to zero."""


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    chosen,
    blocks,
    tokens,
    experts,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    taken = tl.load(chosen + token[:, None] * experts + expert[None, :], mask=inside, other=0)
    counts = tl.sum(taken.to(tl.int32), 0)
    tl.store(blocks + tl.program_id(0) * experts + expert, counts, mask=expert < experts)


@triton.jit
def _order(  # type: ignore[no-untyped-def]
    chosen,
    blocks,
    of_rows,
    entries,
    rows,
    totals,
    tokens,
    experts,
    most,
    count,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.arange(0, BLOCK)
    used = expert < experts
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.num_programs(0), BLOCKS):
        other = start + tl.arange(0, BLOCKS)
        known = (other < tl.num_programs(0))[:, None] & used[None, :]
        places = other[:, None] * experts + expert[None, :]
        counts = tl.load(blocks + places, mask=known, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < tl.program_id(0))[:, None], counts, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(totals + expert, total.to(tl.int64), mask=used)
    first = tl.cumsum(total, 0) - total + before
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None] & used[None, :]
    entry = token[:, None] * experts + expert[None, :]
    taken = tl.load(chosen + entry, mask=inside, other=0).to(tl.int32)
    row = first[None, :] + tl.cumsum(taken, 0) - 1
    place = tl.cumsum(taken, 1) - 1
    is_row = (taken > 0) & (row < count)
    of_row = tl.broadcast_to(token[:, None], (TOKENS, BLOCK))
    tl.store(of_rows + row, of_row.to(tl.int64), mask=is_row)
    tl.store(entries + row, entry.to(tl.int64), mask=is_row)
    target = token[:, None] * most + place
    tl.store(rows + target, row.to(tl.int64), mask=is_row & (place < most))
    # Expert numbers stand for the places of a token that has fewer experts.
    unused = (expert[None, :] >= tl.sum(taken, 1)[:, None]) & (expert < most)[None, :]
    target = token[:, None] * most + expert[None, :]
    tl.store(rows + target, -1, mask=unused & inside)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    values,
    rows,
    sums,
    most,
    columns,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for number in range(most):
        row = tl.load(rows + token * most + number)
        part = tl.load(values + row * columns + column, mask=used & (row >= 0), other=0.0)
        total += part.to(tl.float32)
    tl.store(sums + token * columns + column, total.to(sums.dtype.element_ty), mask=used)


@triton.jit
def _zero_empty(  # type: ignore[no-untyped-def]
    gradients,
    counts,
    size,
    ZEROED: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    if tl.load(counts + matrix) == 0:
        for start in range(tl.program_id(1) * ZEROED, size, tl.num_programs(1) * ZEROED):
            place = start + tl.arange(0, ZEROED)
            zeros = tl.zeros([ZEROED], gradients.dtype.element_ty)
            tl.store(gradients + matrix * size + place, zeros, mask=place < size)


def order_by_expert(chosen: Tensor, most: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels that find the order."""
    tokens, experts = chosen.shape
    chosen = chosen.contiguous().view(torch.int8)
    block = triton.next_power_of_2(experts)
    of_program = max(TILE // block, 1)
    programs = triton.cdiv(tokens, of_program)
    blocks = torch.empty(programs, experts, dtype=torch.int32, device=chosen.device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=chosen.device)

    of_rows, entries, totals = integers(count), integers(count), integers(experts)
    rows = integers(tokens, most)
    if not programs:
        return of_rows, entries, rows, totals.zero_()
    options = {"TOKENS": of_program, "BLOCK": block, "num_warps": 8}
    _count[(programs,)](chosen, blocks, tokens, experts, **options)
    _order[(programs,)](
        chosen,
        blocks,
        of_rows,
        entries,
        rows,
        totals,
        tokens,
        experts,
        most,
        count,
        BLOCKS=BLOCKS,
        **options,
    )
    return of_rows, entries, rows, totals


def sum_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Launch the sums."""
    (tokens, most), columns = rows.shape, values.shape[1]
    values = values.contiguous()
    sums = values.new_empty(tokens, columns)
    if tokens:
        block = min(triton.next_power_of_2(columns), COLUMNS)
        grid = tokens, triton.cdiv(columns, block)
        _sum_rows[grid](values, rows, sums, most, columns, COLUMNS=block, num_warps=4)
    return sums


def zero_empty(gradients: Tensor, counts: Tensor) -> None:
    """Launch the zeroing."""
    if gradients.numel():
        size = gradients[0].numel()
        grid = len(gradients), min(triton.cdiv(size, ZEROED), 16)
        _zero_empty[grid](gradients, counts, size, ZEROED=ZEROED, num_warps=8)


_LIBRARY = torch.library.Library("mcore_qwen3vl", "FRAGMENT")
_LIBRARY.define(
    "order_by_expert(Tensor chosen, int most, int count) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("sum_rows(Tensor values, Tensor rows) -> Tensor")
_LIBRARY.define("zero_empty(Tensor(a!) gradients, Tensor counts) -> ()")
for _operator in (order_by_expert, sum_rows, zero_empty):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl


def order_on_host(order: Callable[..., Any]) -> None:
    """Let `order` do for the CPU what the kernel does; the simulated GPU asks for it."""
    if not INTERPRETED:
        _LIBRARY.impl("order_by_expert", order, "CPU")
