"""The Triton kernel of :mod:`mcore_qwen3vl.kernels.gelu`, where its arguments are described.

For n values of b bytes it reads 2 n b bytes and writes as many. With 16,384 patches and 4,096
columns in bf16, n b is 134 MB. The eager twin moves twice as much.

A program takes a block of columns and every :data:`GROUPS`-th tile of rows, and adds up its columns
in registers. Another kernel adds the programs' parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_qwen3vl.kernels import INTERPRETED
from mcore_qwen3vl.kernels.sums_triton import sum_parts
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

COLUMNS = 128
ROWS = 32
GROUPS = 32


@triton.jit
def _gelu_gradient(  # type: ignore[no-untyped-def]
    gradient,
    inputs,
    of_inputs,
    activated,
    parts,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    used = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & used[None, :]
        places = row[:, None] * columns + column[None, :]
        x = tl.load(inputs + places, mask=inside, other=0.0).to(tl.float32)
        # With u = sqrt(2 / pi) (x + 0.044715 x^3), GELU is x (1 + tanh(u)) / 2 = x sigmoid(2 u).
        square = x * x
        weight = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * square))
        tl.store(activated + places, (x * weight).to(activated.dtype.element_ty), mask=inside)
        slope = 1.5957691216057308 * (1 + 0.134145 * square)
        derivative = weight + x * weight * (1 - weight) * slope
        result = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32) * derivative
        tl.store(of_inputs + places, result.to(of_inputs.dtype.element_ty), mask=inside)
        total += tl.sum(result, 0)
    tl.store(parts + tl.program_id(1) * columns + column, total, mask=used)


def gelu_gradient(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `inputs`, its sums over the rows, and GELU again.

    This is the kernel of :func:`mcore_qwen3vl.kernels.gelu.gelu_gradient`.
    """
    inputs = inputs.contiguous()
    rows, columns = inputs.shape
    of_inputs, activated = torch.empty_like(inputs), torch.empty_like(inputs)
    groups = min(triton.cdiv(rows, ROWS), GROUPS)
    parts = torch.empty(1, groups, columns, dtype=torch.float32, device=inputs.device)
    if groups:
        _gelu_gradient[(triton.cdiv(columns, COLUMNS), groups)](
            gradient.contiguous(),
            inputs,
            of_inputs,
            activated,
            parts,
            rows,
            columns,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=8,
        )
    return of_inputs, sum_parts(parts, inputs.dtype)[0], activated


_LIBRARY = torch.library.Library("mcore_qwen3vl", "FRAGMENT")
_LIBRARY.define("gelu_gradient(Tensor gradient, Tensor inputs) -> (Tensor, Tensor, Tensor)")
_LIBRARY.impl("gelu_gradient", gelu_gradient, "CPU" if INTERPRETED else "CUDA")

OPERATORS: Any = torch.ops.mcore_qwen3vl
