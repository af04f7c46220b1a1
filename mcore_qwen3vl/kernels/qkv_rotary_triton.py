"""Triton kernels of :mod:`mcore_qwen3vl.kernels.qkv_rotary`, where their arguments are described.

For n tokens whose queries take b bytes, the forward pass reads and writes 2 n b bytes, and the
backward pass 3 n b. With 16,384 patches of 16 heads of 64 in bf16, n b is 34 MB. The cosines and
sines, which the heads share, are a sixteenth of that in float32.

A program takes some heads of queries, of keys, or in the backward pass of values, which it copies.
It reads both halves of a head before it writes either.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

TILE = 2048
"""Pairs of columns of a program."""


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    of_query,
    of_key,
    of_value,
    qkv,
    cos,
    sin,
    rows,
    heads,
    half,
    angle_stride,
    GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # a head of a token
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < half)[None, :]
    token = row // heads
    target = qkv + ((token * 3 + part) * heads + row % heads)[:, None] * 2 * half + column[None, :]
    angle = token[:, None] * angle_stride + column[None, :]
    turns = inside & (part < 2)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    if GRADIENT:
        s = -s
        source = row[:, None] * 2 * half + column[None, :]
        first = tl.load(of_query + source, mask=inside & (part == 0), other=0.0).to(tl.float32)
        second = tl.load(of_query + source + half, mask=inside & (part == 0), other=0.0)
        second = second.to(tl.float32)
        first += tl.load(of_key + source, mask=inside & (part == 1), other=0.0).to(tl.float32)
        second += tl.load(of_key + source + half, mask=inside & (part == 1), other=0.0)
        first += tl.load(of_value + source, mask=inside & (part == 2), other=0.0).to(tl.float32)
        second += tl.load(of_value + source + half, mask=inside & (part == 2), other=0.0)
    else:
        first = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(target + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (first * c - second * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(qkv.dtype.element_ty), mask=inside)


def _launch(
    gradients: tuple[Tensor | None, ...], qkv: Tensor, cos: Tensor, sin: Tensor, parts: int
) -> None:
    tokens, _, heads, width = qkv.shape
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    block = triton.next_power_of_2(width // 2)
    rows, of_program = tokens * heads, max(TILE // block, 1)
    if rows:
        _rotate[(triton.cdiv(rows, of_program), parts)](
            *gradients,
            qkv,
            cos,
            sin,
            rows,
            heads,
            width // 2,
            cos.stride(0),
            GRADIENT=parts == 3,
            ROWS=of_program,
            BLOCK=block,
            num_warps=8,
        )


def rotate_qk(pair: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Launch the forward pass on queries and keys, (n, 2, heads, D), each token's before values."""
    _launch((None, None, None), pair, cos, sin, 2)


def rotary_gradient(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Launch the backward pass."""
    tokens, heads, width = of_query.shape
    gradients = tuple(part.contiguous() for part in (of_query, of_key, of_value))
    qkv = of_query.new_empty(tokens, 3, heads, width)
    _launch(gradients, qkv, cos, sin, 3)
    return qkv


_LIBRARY = torch.library.Library("mcore_qwen3vl", "FRAGMENT")
_LIBRARY.define("rotate_qk(Tensor(a!) pair, Tensor cos, Tensor sin) -> ()")
_LIBRARY.define(
    "rotary_gradient(Tensor of_query, Tensor of_key, Tensor of_value, Tensor cos, Tensor sin) "
    "-> Tensor"
)
for _operator in (rotate_qk, rotary_gradient):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl
