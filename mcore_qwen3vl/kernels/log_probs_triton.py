"""Triton kernels of :mod:`mcore_qwen3vl.kernels.log_probs`, where their arguments are described.

For n tokens and V columns of b bytes, the reduction reads n V b bytes, and the gradient reads and
writes as many; what else they move is less than a thousandth. With 8,192 tokens and a vocabulary of
152k in bf16, that is 2.5 and 5 GB. The eager twins move 27 and 40 GB.

A program of the reduction takes a row, in one pass: when a block has a larger maximum, the sums so
far are scaled to it (Milakov and Gimelshein, 2018, arXiv 1805.02867). A program of the gradient
takes a block of a row, and each element is read and written by the same program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED

BLOCK = 4096
WARPS = 8
LOWEST = torch.finfo(torch.float32).min


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    logits,
    targets,
    maximum,
    sums,
    columns,
    row_stride,
    sums_stride,
    lowest,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # a chunk may have more than 2**31 bytes
    logits += row * row_stride
    highest = lowest
    total = 0.0
    moment = 0.0
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < columns
        block = tl.load(logits + places, mask=inside, other=-float("inf"))
        block = block.to(tl.float32) * inverse_temperature
        larger = tl.maximum(highest, tl.max(block, 0))
        rise = highest - larger
        scale = tl.exp(rise)
        shifted = block - larger
        weights = tl.exp(shifted)
        if ENTROPY:
            weighted = tl.where(inside, weights * shifted, 0.0)
            moment = scale * (moment + rise * total) + tl.sum(weighted, 0)
        total = scale * total + tl.sum(weights, 0)
        highest = larger
    target = tl.load(targets + row)
    of_target = tl.load(logits + target).to(tl.float32) * inverse_temperature
    tl.store(maximum + row, highest)
    tl.store(sums + row, total)
    tl.store(sums + sums_stride + row, of_target)
    if ENTROPY:
        tl.store(sums + 2 * sums_stride + row, moment)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    logits,
    targets,
    totals,
    of_log_probs,
    of_targets,
    of_entropies,
    entropies,
    columns,
    row_stride,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < columns
    logits += row * row_stride + places
    block = tl.load(logits, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    shifted = block - tl.load(totals + row)
    factor = -tl.load(of_log_probs + row)
    if ENTROPY:
        factor = factor - (shifted + tl.load(entropies + row)) * tl.load(of_entropies + row)
    of_target = tl.where(places == tl.load(targets + row), tl.load(of_targets + row), 0.0)
    gradient = tl.exp(shifted) * factor + of_target
    tl.store(logits, gradient.to(logits.dtype.element_ty), mask=inside)


def reduce_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    sums: Tensor,
    entropy: bool,
) -> None:
    """Launch the reduction."""
    _reduce[(len(logits),)](
        logits,
        targets,
        maximum,
        sums,
        logits.shape[1],
        logits.stride(0),
        sums.stride(0),
        LOWEST,
        1 / temperature,
        ENTROPY=entropy,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    total: Tensor,
    of_log_probs: Tensor,
    of_target: Tensor,
    of_entropies: Tensor | None = None,
    entropies: Tensor | None = None,
) -> None:
    """Launch the gradient."""
    tokens, columns = logits.shape
    _write[(tokens, triton.cdiv(columns, BLOCK))](
        logits,
        targets,
        total,
        of_log_probs,
        of_target,
        of_entropies,
        entropies,
        columns,
        logits.stride(0),
        1 / temperature,
        ENTROPY=of_entropies is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


_LIBRARY = torch.library.Library("mcore_qwen3vl", "DEF")
_LIBRARY.define(
    "reduce_logits(Tensor logits, Tensor targets, float temperature, Tensor(a!) maximum, "
    "Tensor(b!) sums, bool entropy) -> ()"
)
_LIBRARY.define(
    "write_gradient(Tensor(a!) logits, Tensor targets, float temperature, Tensor total, "
    "Tensor of_log_probs, Tensor of_target, Tensor? of_entropies, Tensor? entropies) -> ()"
)
for _operator in (reduce_logits, write_gradient):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl
