"""The grouped product equals one product for each matrix, with and without a grouped kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_qwen3vl.model.decoder import experts
from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product

COUNTS = [3, 0, 5, 1]
KERNEL, NO_KERNEL = (12, 20), (10, 14)  # in, out: the kernel needs lines of whole 16 bytes


def one_by_one(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    runs = rows.split(counts)
    return torch.cat([run @ one.T for run, one in zip(runs, matrices, strict=True)])


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [4]], ids=["some", "no rows", "one"])
@pytest.mark.parametrize("shape", [KERNEL, NO_KERNEL], ids=["kernel", "no kernel"])
@pytest.mark.parametrize("on", ["list", "tensor"])
def test_products_and_gradients(counts: list[int], shape: tuple[int, int], on: str) -> None:
    torch.manual_seed(5)
    width, out = shape
    given = [torch.randn(sum(counts), width), torch.randn(len(counts), out, width)]
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    groups = Groups.from_counts(counts if on == "list" else torch.tensor(counts), given[0].device)
    result, expected = grouped_product(*ours, groups), one_by_one(*theirs, counts)
    torch.testing.assert_close(result, expected)
    gradient = torch.randn_like(expected)
    result.backward(gradient)
    expected.backward(gradient)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    ("shape", "dtype", "calls"),
    [
        (KERNEL, torch.float32, 1),
        (NO_KERNEL, torch.float32, 0),
        (KERNEL, torch.bfloat16, 0),  # lines of 24 and 40 bytes
        ((16, 24), torch.bfloat16, 1),
        (KERNEL, torch.float64, 0),
    ],
)
def test_when_the_kernel_is_taken(shape: tuple[int, int], dtype: torch.dtype, calls: int) -> None:
    rows, matrices = torch.randn(9, shape[0]), torch.randn(4, *shape[::-1])
    groups = Groups.from_counts(COUNTS, rows.device)
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
        result = grouped_product(rows.to(dtype), matrices.to(dtype), groups)
    assert (kernel.call_count, result.dtype) == (calls, dtype)


class Unwritten(TorchDispatchMode):
    """Leaves NaN where ``F.grouped_mm`` has no rows to sum over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default and args[0].dim() == args[1].dim() == 2:
            result[args[2].diff(prepend=args[2].new_zeros(1)) == 0] = torch.nan
        return result


@pytest.mark.parametrize("counts", [COUNTS, [3, 1, 4, 1]])
def test_what_the_kernel_leaves_for_no_rows_is_no_gradient(counts: list[int]) -> None:
    """On Blackwell the kernel leaves groups without rows unwritten: pytorch/pytorch#172439."""
    rows, matrices = torch.randn(9, 12), torch.randn(4, 20, 12, requires_grad=True)
    with Unwritten():
        grouped_product(rows, matrices, Groups.from_counts(counts, rows.device)).sum().backward()
    assert matrices.grad is not None
    sums = torch.stack([run.sum(0) for run in rows.split(counts)])
    torch.testing.assert_close(matrices.grad, sums[:, None].expand(-1, 20, -1))


def test_rows_at_an_odd_address_do_without_the_kernel() -> None:
    rows = torch.randn(9 * 12 + 1)[1:].view(9, 12)
    matrices = torch.randn(4, 20, 12)
    assert not experts._has_kernel(rows, matrices)
    expected = one_by_one(rows, matrices, COUNTS)
    torch.testing.assert_close(
        grouped_product(rows, matrices, Groups.from_counts(COUNTS, rows.device)), expected
    )


def test_sizes_on_the_host() -> None:
    groups = Groups.from_counts(torch.tensor(COUNTS), torch.device("cpu"))
    assert groups.sizes == COUNTS
    assert groups.ends.tolist() == [3, 3, 8, 9]
    assert groups.ends.dtype == torch.int32
