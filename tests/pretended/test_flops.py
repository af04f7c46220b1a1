"""FLOPs for which PyTorch has no formula, and bytes of all other kernels, are counted right."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product
from mcore_qwen3vl.pretended.rank import BYTES, FUSED, CountWork, count_compiled

COUNTS = [3, 0, 5]


def counted(rows: Tensor, matrices: Tensor, together: bool) -> int:
    with CountWork() as flops:
        if together:
            result = grouped_product(rows, matrices, Groups.from_counts(COUNTS, rows.device))
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


def each_launches() -> CountWork:
    return CountWork(count().__next__)


def test_other_kernels_count_what_they_read_and_write() -> None:
    a, b = torch.randn(3, 5), torch.randn(5)
    with each_launches() as work:
        torch.add(a, b)
    assert work.counts == {BYTES: 4 * (15 + 5 + 15)}
    with each_launches() as work:
        a.add_(b)  # reads and writes a
    assert work.counts == {BYTES: 4 * (15 + 5 + 15)}
    with each_launches() as work:
        torch._foreach_mul_([a, b], 2.0)
    assert work.counts == {BYTES: 4 * 2 * (15 + 5)}
    with CountWork() as work:  # nothing is launched
        a.view(-1)
    assert not work.counts


def test_what_would_be_compiled_counts_as_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    count_compiled()

    @torch.compile(dynamic=True)
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return gate.sigmoid() * gate * up

    gate, up = torch.randn(2, 3, 5)
    with each_launches() as work:
        swiglu(gate, up)
    # The counter rises when read: twice by an operator on its own, once by one inside a kernel.
    assert work.counts == {BYTES: 4 * 3 * 15, FUSED: 3}
    assert swiglu(gate, up).shape == (3, 5)  # it also works where nothing is counted
