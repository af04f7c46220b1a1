"""Triton kernels of :mod:`mcore_qwen3vl.kernels.norm`, where their arguments are described.

For n values of b bytes, the forward pass reads and writes 2 n b bytes, with an addition 4 n b. The
backward pass takes 3 n b, and 4 n b where a residual's gradient is added. With 8,192 rows of 2,048
in bf16, n b is 34 MB. Statistics, and the parts of the parameters' gradients, are less than a tenth
of that.

A program of the forward pass takes a tile of whole rows. A program of the backward pass takes every
`PROGRAMS`-th tile, and adds up the parameters' gradients of its rows in registers. Another kernel
adds the programs' parts, so that the result does not depend on the order in which they end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED
from mcore_qwen3vl.kernels.sums_triton import sum_parts
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

TILE = 4096
"""Values of a tile, unless a row has more."""
PROGRAMS = 512


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    added,
    weight,
    bias,
    normed,
    total,
    statistics,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    eps,
    offset,
    ADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    start = row // inner * outer_stride + row % inner * inner_stride
    places = row[:, None] * columns + column[None, :]
    values = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(added + places, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, 1) / columns
        tl.store(statistics + row, mean, mask=row < rows)
        statistics += rows
        values = tl.where(inside, values - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(values * values, 1) / columns + eps)
    tl.store(statistics + row, scale, mask=row < rows)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + offset
    result = values * scale[:, None] * factor[None, :]
    if CENTRED:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        result += shift[None, :]
    tl.store(normed + places, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    gradient,
    x,
    weight,
    statistics,
    of_residual,
    of_rows,
    parts,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    offset,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    PARAMETERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    used = column < columns
    factor = tl.load(weight + column, mask=used, other=0.0).to(tl.float32) + offset
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & used[None, :]
        start = row // inner * outer_stride + row % inner * inner_stride
        places = row[:, None] * columns + column[None, :]
        values = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
        values = values.to(tl.float32)
        if CENTRED:
            values -= tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
            scale = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
        else:
            scale = tl.load(statistics + row, mask=row < rows, other=0.0)
        normed = tl.where(inside, values * scale[:, None], 0.0)
        arriving = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        weighted = arriving * factor[None, :]
        along = tl.sum(weighted * normed, 1) / columns
        result = weighted - normed * along[:, None]
        if CENTRED:
            result -= (tl.sum(weighted, 1) / columns)[:, None]
        result *= scale[:, None]
        if RESIDUAL:
            result += tl.load(of_residual + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_rows + places, result.to(of_rows.dtype.element_ty), mask=inside)
        if PARAMETERS:
            of_weight += tl.sum(arriving * normed, 0)
            if CENTRED:
                of_bias += tl.sum(arriving, 0)
    if PARAMETERS:
        part = parts + tl.program_id(0) * columns + column
        tl.store(part, of_weight, mask=used)
        if CENTRED:
            tl.store(part + tl.num_programs(0) * columns, of_bias, mask=used)


class _Rows(NamedTuple):
    """Where the rows of a tensor (..., C) are: `inner` of them have one distance."""

    tensor: Tensor
    rows: int
    columns: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def options(self) -> dict[str, int]:
        block = triton.next_power_of_2(self.columns)
        warps = 16 if block > 2 * TILE else 8
        return {"BLOCK": block, "ROWS": max(TILE // block, 1), "num_warps": warps}


def _rows_of(x: Tensor) -> _Rows:
    """Find the rows of `x`; copy it if its rows have more than two distances."""
    axes: list[tuple[int, int]] = []  # (length, distance), the innermost last
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = axes[-1][0] * length, stride
        else:
            axes.append((length, stride))
    if len(axes) > 2:
        return _rows_of(x.contiguous())
    (_, outer), (inner, stride) = [(1, 0), (1, 0), *axes][-2:]
    columns = x.shape[-1]
    return _Rows(x, x.numel() // columns, columns, inner, outer, stride)


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward pass; without `added` the sum is empty."""
    at = _rows_of(x)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty(0) if added is None else torch.empty_like(normed)
    kinds = 1 if bias is None else 2
    statistics = torch.empty(kinds, at.rows, dtype=torch.float32, device=x.device)
    options = at.options
    if at.rows:
        _normalise[(triton.cdiv(at.rows, options["ROWS"]),)](
            at.tensor,
            None if added is None else added.contiguous(),
            weight,
            bias,
            normed,
            total,
            statistics,
            *at[1:],
            eps,
            offset,
            ADDED=added is not None,
            CENTRED=bias is not None,
            **options,
        )
    return normed, statistics, total


def norm_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    offset: float,
    of_x: Tensor | None,
    of_parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward pass; what is not computed is empty."""
    at, options = _rows_of(x), _rows_of(x).options
    of_rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    programs = min(triton.cdiv(at.rows, options["ROWS"]), PROGRAMS)
    kinds = len(statistics)
    size = (kinds, programs, at.columns) if of_parameters else (0, 0, 0)
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    if programs:
        _gradients[(programs,)](
            gradient.contiguous(),
            at.tensor,
            weight,
            statistics,
            None if of_x is None else of_x.contiguous(),
            of_rows,
            parts,
            *at[1:],
            offset,
            RESIDUAL=of_x is not None,
            CENTRED=kinds == 2,
            PARAMETERS=of_parameters,
            **options,
        )
    if not of_parameters:
        return of_rows, weight.new_empty(0), weight.new_empty(0)
    of_weight, *of_bias = sum_parts(parts, weight.dtype).unbind()
    return of_rows, of_weight, of_bias[0] if of_bias else weight.new_empty(0)


_LIBRARY = torch.library.Library("mcore_qwen3vl", "FRAGMENT")
_LIBRARY.define(
    "normalise(Tensor x, Tensor weight, Tensor? bias, float eps, float offset, Tensor? added) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "norm_gradients(Tensor gradient, Tensor x, Tensor weight, Tensor statistics, float offset, "
    "Tensor? of_x, bool of_parameters) -> (Tensor, Tensor, Tensor)"
)
for _operator in (normalise, norm_gradients):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl
