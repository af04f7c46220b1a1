"""Triton kernels of :mod:`mcore_qwen3vl.kernels.heads`, where their arguments are described.

For t tokens and a projection of C columns of b bytes, :func:`split_heads` reads and writes t C b
bytes. The gradient reads and writes as many, and reads the projection too. The tables are R / C of
that. For a layer of 2B and 8,192 tokens in bf16 that is 0.14 and 0.20 GB; the
eager code moves 0.33 and 0.43 GB.

A program takes a token; where the gradient of the weights is asked for, every
:data:`PROGRAMS`-th one, and adds it up over its tokens, in an order that never changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED
from mcore_qwen3vl.kernels.sums_triton import sum_parts

PROGRAMS = 512
VALUES = 4096
"""Values of heads that a program holds at a time."""
WARPS = 4


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    start, first, together, stride, width, BLOCK: tl.constexpr
):
    """Return a block of heads, and the column of each one's first value."""
    head = start + tl.arange(0, BLOCK)
    return head, first + (head // together) * stride + (head % together) * width


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    heads, groups, width, GATE: tl.constexpr
):
    """Return the queries of a group, the columns of a group, and the column of its key."""
    together = heads // groups
    first_key = 2 * together * width if GATE else together * width
    return together, first_key + 2 * width, first_key


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    apart,
    row,
    number,
    first,
    together,
    stride,
    width,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BACK: tl.constexpr,
):
    """Copy `number` heads from a row to their own tensor, or back."""
    i = tl.arange(0, WIDTH)[None, :]
    for start in range(0, number, BLOCK):
        head, column = _columns(start, first, together, stride, width, BLOCK)
        inside = (head < number)[:, None] & (i < width)
        here = row + column[:, None] + i
        there = apart + head[:, None] * width + i
        if BACK:
            tl.store(here, tl.load(there, mask=inside), mask=inside)
        else:
            tl.store(there, tl.load(here, mask=inside), mask=inside)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    weight, base, half, width, HALF: tl.constexpr, REST: tl.constexpr
):
    """Return a norm's weights: of the first half of what is rotated, of the second, of the rest."""
    i, k = tl.arange(0, HALF), tl.arange(0, REST)
    first = tl.load(weight + i, mask=i < half, other=0.0).to(tl.float32) + base
    second = tl.load(weight + half + i, mask=i < half, other=0.0).to(tl.float32) + base
    rest = tl.load(weight + 2 * half + k, mask=2 * half + k < width, other=0.0)
    return first, second, rest.to(tl.float32) + base


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    source, inside, half, width, HALF: tl.constexpr, REST: tl.constexpr
):
    """Return a block of heads in float32, in the three parts of their values.

    A head without a rest has a part of one value, which is 0.
    """
    i, k = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    halves = inside & (i < half)
    first = tl.load(source + i, mask=halves, other=0.0).to(tl.float32)
    second = tl.load(source + half + i, mask=halves, other=0.0).to(tl.float32)
    rest = tl.load(source + 2 * half + k, mask=inside & (2 * half + k < width), other=0.0)
    return first, second, rest.to(tl.float32)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    target, inside, half, width, first, second, rest, HALF: tl.constexpr, REST: tl.constexpr
):
    """Store what :func:`_load` returns."""
    i, k = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    halves = inside & (i < half)
    kind = target.dtype.element_ty
    tl.store(target + i, first.to(kind), mask=halves)
    tl.store(target + half + i, second.to(kind), mask=halves)
    tl.store(target + 2 * half + k, rest.to(kind), mask=inside & (2 * half + k < width))


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    first, second, rest, width, eps
):
    """Return the inverse root mean square of each head."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
    return tl.rsqrt(squares / width + eps)[:, None]


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    apart,
    weight,
    row,
    cos,
    sin,
    number,
    first,
    together,
    stride,
    half,
    width,
    eps,
    base,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Norm and rotate `number` heads of a row into their own tensor."""
    w1, w2, w3 = _weights(weight, base, half, width, HALF, REST)
    for start in range(0, number, BLOCK):
        head, column = _columns(start, first, together, stride, width, BLOCK)
        inside = (head < number)[:, None]
        x1, x2, x3 = _load(row + column[:, None], inside, half, width, HALF, REST)
        scale = _scale(x1, x2, x3, width, eps)
        x1, x2, x3 = x1 * scale, x2 * scale, x3 * scale
        x1, x2, x3 = x1 * w1[None, :], x2 * w2[None, :], x3 * w3[None, :]
        there = apart + head[:, None] * width
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        _store(there, inside, half, width, y1, y2, x3, HALF, REST)


@triton.jit
def _turn_back(  # type: ignore[no-untyped-def]
    apart,
    weight,
    row,
    of_row,
    cos,
    sin,
    number,
    first,
    together,
    stride,
    half,
    width,
    eps,
    base,
    sum1,
    sum2,
    sum3,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Write the gradient of `number` heads into a row, and return the sums with their weights'."""
    w1, w2, w3 = _weights(weight, base, half, width, HALF, REST)
    for start in range(0, number, BLOCK):
        head, column = _columns(start, first, together, stride, width, BLOCK)
        inside = (head < number)[:, None]
        y1, y2, g3 = _load(apart + head[:, None] * width, inside, half, width, HALF, REST)
        g1, g2 = y1 * cos + y2 * sin, y2 * cos - y1 * sin
        x1, x2, x3 = _load(row + column[:, None], inside, half, width, HALF, REST)
        scale = _scale(x1, x2, x3, width, eps)
        x1, x2, x3 = x1 * scale, x2 * scale, x3 * scale
        sum1 += tl.sum(g1 * x1, 0)
        sum2 += tl.sum(g2 * x2, 0)
        sum3 += tl.sum(g3 * x3, 0)
        g1, g2, g3 = g1 * w1[None, :], g2 * w2[None, :], g3 * w3[None, :]
        mean = (tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1) + tl.sum(g3 * x3, 1))[:, None] / width
        g1, g2, g3 = g1 - x1 * mean, g2 - x2 * mean, g3 - x3 * mean
        g1, g2, g3 = g1 * scale, g2 * scale, g3 * scale
        _store(of_row + column[:, None], inside, half, width, g1, g2, g3, HALF, REST)
    return sum1, sum2, sum3


@triton.jit
def _load_angles(  # type: ignore[no-untyped-def]
    cos, sin, token, cos_stride, sin_stride, half, HALF: tl.constexpr
):
    i = tl.arange(0, HALF)
    c = tl.load(cos + token * cos_stride + i, mask=i < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + i, mask=i < half, other=0.0).to(tl.float32)
    return c[None, :], s[None, :]


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    projection,
    query,
    key,
    value,
    gate,
    query_weight,
    key_weight,
    cos,
    sin,
    row_stride,
    cos_stride,
    sin_stride,
    half,
    eps,
    base,
    heads,
    groups,
    width,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    together, stride, first_key = _places(heads, groups, width, GATE)
    token = tl.program_id(0).to(tl.int64)
    row = projection + token * row_stride
    c, s = _load_angles(cos, sin, token, cos_stride, sin_stride, half, HALF)
    query += token * heads * width
    key += token * groups * width
    value += token * groups * width
    _turn(
        query, query_weight, row, c, s, heads, 0, together, stride, half, width, eps, base,
        BLOCK, HALF, REST,
    )  # fmt: skip
    _turn(
        key, key_weight, row, c, s, groups, first_key, 1, stride, half, width, eps, base,
        BLOCK, HALF, REST,
    )  # fmt: skip
    _copy(value, row, groups, first_key + width, 1, stride, width, BLOCK, WIDTH, False)
    if GATE:
        gate += token * heads * width
        _copy(gate, row, heads, together * width, together, stride, width, BLOCK, WIDTH, False)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    projection,
    of_projection,
    query,
    key,
    value,
    gate,
    query_weight,
    key_weight,
    sums,
    cos,
    sin,
    tokens,
    row_stride,
    of_row_stride,
    cos_stride,
    sin_stride,
    half,
    eps,
    base,
    heads,
    groups,
    width,
    SUMS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    together, stride, first_key = _places(heads, groups, width, GATE)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    q1, q2 = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    k1, k2 = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    q3, k3 = tl.zeros([REST], tl.float32), tl.zeros([REST], tl.float32)
    for turn in range(tl.cdiv(tokens - program, programs)):
        token = program + turn * programs
        row, of_row = projection + token * row_stride, of_projection + token * of_row_stride
        c, s = _load_angles(cos, sin, token, cos_stride, sin_stride, half, HALF)
        q1, q2, q3 = _turn_back(
            query + token * heads * width, query_weight, row, of_row, c, s, heads, 0, together,
            stride, half, width, eps, base, q1, q2, q3, BLOCK, HALF, REST,
        )  # fmt: skip
        k1, k2, k3 = _turn_back(
            key + token * groups * width, key_weight, row, of_row, c, s, groups, first_key, 1,
            stride, half, width, eps, base, k1, k2, k3, BLOCK, HALF, REST,
        )  # fmt: skip
        _copy(
            value + token * groups * width, of_row, groups, first_key + width, 1, stride, width,
            BLOCK, WIDTH, True,
        )  # fmt: skip
        if GATE:
            _copy(
                gate + token * heads * width, of_row, heads, together * width, together, stride,
                width, BLOCK, WIDTH, True,
            )  # fmt: skip
    if SUMS:
        i, k = tl.arange(0, HALF), 2 * half + tl.arange(0, REST)
        here = sums + program * 2 * width
        tl.store(here + i, q1, mask=i < half)
        tl.store(here + half + i, q2, mask=i < half)
        tl.store(here + k, q3, mask=k < width)
        here += width
        tl.store(here + i, k1, mask=i < half)
        tl.store(here + half + i, k2, mask=i < half)
        tl.store(here + k, k3, mask=k < width)


def split_heads(
    projection: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    columns: list[int],
    eps: float,
    base: float,
) -> list[Tensor]:
    """Return queries, keys and values, and the gates if there are any."""
    heads, groups, width, gated = columns
    tokens = len(projection)
    numbers = (heads, groups, groups, heads) if gated else (heads, groups, groups)
    outputs = [projection.new_empty(tokens, number, width) for number in numbers]
    if tokens:
        _split[(tokens,)](
            projection,
            *outputs[:3],
            outputs[-1],
            query_weight,
            key_weight,
            cos,
            sin,
            projection.stride(0),
            cos.stride(0),
            sin.stride(0),
            cos.shape[1],
            eps,
            base,
            heads,
            groups,
            width,
            GATE=bool(gated),
            **_blocks(heads, width, cos.shape[1]),
        )
    return outputs


def join_head_gradients(
    projection: Tensor,
    gradients: list[Tensor],
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    columns: list[int],
    eps: float,
    base: float,
    of_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the projection, and those (2, D) of queries' and keys' weights.

    The second tensor is empty if it is not asked for.
    """
    heads, groups, width, gated = columns
    tokens = len(gradients[0])
    count = sum(gradient.shape[1] for gradient in gradients)
    of_projection = gradients[0].new_empty(tokens, count * width)
    programs = min(PROGRAMS, tokens) if of_weights else tokens
    parts = cos.new_empty(1, programs if of_weights else 0, 2 * width, dtype=torch.float32)
    if tokens:
        _join[(programs,)](
            projection,
            of_projection,
            *gradients[:3],
            gradients[-1],
            query_weight,
            key_weight,
            parts,
            cos,
            sin,
            tokens,
            projection.stride(0),
            of_projection.stride(0),
            cos.stride(0),
            sin.stride(0),
            cos.shape[1],
            eps,
            base,
            heads,
            groups,
            width,
            SUMS=of_weights,
            GATE=bool(gated),
            **_blocks(heads, width, cos.shape[1]),
        )
    if not of_weights:
        return of_projection, query_weight.new_empty(0, width)
    return of_projection, sum_parts(parts, query_weight.dtype).view(2, width)


def _blocks(heads: int, width: int, half: int) -> dict[str, int]:
    """Return the sizes of blocks for heads of `width` values, of which 2 x `half` are rotated."""
    whole = triton.next_power_of_2(width)
    return {
        "BLOCK": min(triton.next_power_of_2(heads), max(VALUES // whole, 1)),
        "HALF": triton.next_power_of_2(half),
        "REST": triton.next_power_of_2(max(width - 2 * half, 1)),
        "WIDTH": whole,
        "num_warps": WARPS,
    }


_LIBRARY = torch.library.Library("mcore_qwen3vl", "FRAGMENT")
_LIBRARY.define(
    "split_heads(Tensor projection, Tensor query_weight, Tensor key_weight, Tensor cos, "
    "Tensor sin, int[] columns, float eps, float base) -> Tensor[]"
)
_LIBRARY.define(
    "join_head_gradients(Tensor projection, Tensor[] gradients, Tensor query_weight, "
    "Tensor key_weight, Tensor cos, Tensor sin, int[] columns, float eps, float base, "
    "bool of_weights) -> (Tensor, Tensor)"
)
for _operator in (split_heads, join_head_gradients):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl
