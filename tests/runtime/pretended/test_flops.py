"""FLOPs that PyTorch has no formula for, against products that it has one for."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.grouped import Groups, grouped_product
from mcore_qwen3vl.runtime.pretended.flops import CountFlops

COUNTS = [3, 0, 5]


def counted(rows: Tensor, matrices: Tensor, together: bool) -> int:
    with CountFlops() as flops:
        if together:
            result = grouped_product(rows, matrices, Groups.of(COUNTS, rows.device))
        else:
            runs = zip(rows.split(COUNTS), matrices, strict=True)
            result = torch.cat([run @ one.T for run, one in runs])
        result.backward(torch.randn_like(result))
    return flops.counts["gemm"]


def test_a_grouped_product_counts_as_its_parts() -> None:
    rows = torch.randn(8, 12, requires_grad=True)
    matrices = torch.randn(3, 20, 12, requires_grad=True)
    together = counted(rows, matrices, True)
    assert together == counted(rows, matrices, False) == 3 * 2 * 8 * 12 * 20
