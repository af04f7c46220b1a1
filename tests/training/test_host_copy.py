"""Async host copies of numbers, and the check of the gradient norm that uses them."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.training.host_copy import AsyncHostCopy, NormCheck


def test_numbers_arrive_as_they_were() -> None:
    assert AsyncHostCopy(torch.tensor([3, 5], dtype=torch.int32)).read() == [3, 5]


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), torch.tensor([float("nan")])])
def test_a_norm_that_is_no_number_stops_the_run_at_the_next_step_or_save(
    norm: float | torch.Tensor,
) -> None:
    for settle in (True, False):
        check = NormCheck(lambda step: FloatingPointError(f"step {step}"))
        for iteration, fine in enumerate((None, 0.0, torch.tensor(1e9), 2.0), start=3):
            check.add(fine, iteration)
        check.add(norm, 7)
        with pytest.raises(FloatingPointError, match="step 7"):
            check.settle() if settle else check.add(1.0, 8)
