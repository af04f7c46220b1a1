"""Products of many matrices of one shape, each with its own rows, as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_qwen3vl.model.inputs import to_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Groups:
    """Consecutive runs of rows, one for each of E matrices, in their order.

    Attributes:
        counts: (E,) number of rows in each run, on the host or the device, where they were counted.
        ends: (E,) int32, on the rows' device: the index after each run's last row.
    """

    counts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, counts: Tensor | Sequence[int], device: torch.device) -> Groups:
        """Build groups from the numbers of rows on `device`, without a host sync."""
        if not isinstance(counts, Tensor):
            counts = torch.tensor(counts, device="cpu")
        return cls(counts, to_device(counts.cumsum(0, dtype=torch.int32), device))

    @cached_property
    def sizes(self) -> list[int]:
        """`counts` on the host; takes a host sync if they were counted on the device."""
        sizes: list[int] = self.counts.tolist()
        return sizes

    def clear_empty(self, gradients: Tensor) -> Tensor:
        """Zero, in place and without a host sync, the gradients (E, ...) of runs without rows.

        On some GPUs the kernel leaves uninitialised memory there: pytorch/pytorch#172439, #174314.
        """
        if not self.counts.is_cuda and bool(self.counts.all()):
            return gradients
        empty = to_device(self.counts == 0, gradients.device)
        return gradients.masked_fill_(empty[:, None, None], 0)


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply each run of rows by its own matrix, transposed as in ``F.linear``.

    Rows (T, in) and matrices (E, out, in) of one dtype give (T, out).
    """
    if len(matrices) == 1 or not len(rows):
        return F.linear(rows, matrices[0])
    if _has_kernel(rows, matrices):
        product: Tensor = _GroupedProduct.apply(rows, matrices, groups)
        return product
    runs = rows.split(groups.sizes)
    return torch.cat([F.linear(run, one) for run, one in zip(runs, matrices, strict=True)])


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Return whether ``F.grouped_mm`` has a kernel for these tensors.

    Row sizes and addresses must be multiples of 16 bytes. On a GPU it accepts dtypes other than
    bf16 too, but multiplies one matrix after another, with a host sync for the counts.
    """
    size = rows.element_size()
    if any(length * size % 16 for length in matrices.shape[1:]):
        return False
    if rows.data_ptr() % 16 or matrices.data_ptr() % 16:
        return False
    return rows.dtype == torch.bfloat16 if rows.is_cuda else rows.dtype in _DTYPES


class _GroupedProduct(torch.autograd.Function):
    """``F.grouped_mm`` with PyTorch's own backward, corrected for runs without rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups = groups
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=groups.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        groups, gradient = ctx.groups, gradient.contiguous()
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, matrices, offs=groups.ends)
        if ctx.needs_input_grad[1]:
            of_matrices = F.grouped_mm(gradient.t(), rows, offs=groups.ends)
            of_matrices = groups.clear_empty(of_matrices)
        return of_rows, of_matrices, None
