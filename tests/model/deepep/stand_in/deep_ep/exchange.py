"""The exchange of tokens: each goes once to every rank that has an expert for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """Where this rank's T tokens went, and how many of each rank's it received, R in all.

    Received tokens are ordered by the rank that sent them, then as there.
    """

    group: Any
    tokens: int
    sent: Tensor  # indices of tokens, by destination
    to: list[int]  # tokens sent to each rank
    received: list[int]  # tokens received from each rank

    @classmethod
    def of(cls, in_rank: Tensor, group: Any) -> Route:
        """Agree with the other ranks on the exchange that `in_rank` (T, ranks) asks for."""
        _, sent = in_rank.T.nonzero(as_tuple=True)
        to = in_rank.sum(0, dtype=torch.int64)
        received = torch.empty_like(to)
        dist.all_to_all_single(received, to, group=group)
        return cls(group, len(in_rank), sent, to.tolist(), received.tolist())

    def send(self, values: Tensor) -> Tensor:
        """Send each token's row of `values` (T, ...), and return those received (R, ...)."""
        return self._exchange(values[self.sent], self.to, self.received)

    def send_back(self, values: Tensor) -> Tensor:
        """Return `values` (R, ...) to where they came from, and sum each token's: (T, ...)."""
        rows = self._exchange(values, self.received, self.to)
        total = torch.zeros(self.tokens, *values.shape[1:], dtype=torch.float32)
        return total.index_add_(0, self.sent, rows.float()).to(values.dtype)

    def _exchange(self, rows: Tensor, given: list[int], taken: list[int]) -> Tensor:
        result = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), taken, given, group=self.group)
        return result


def check_rows(rows: Tensor) -> None:
    """Refuse rows that the kernels do not take: float16, views, and rows of odd sizes."""
    assert rows.dim() == 2
    assert rows.is_contiguous(), "tokens must be contiguous"
    assert rows.dtype in (torch.bfloat16, torch.float32), f"tokens in {rows.dtype}"
    assert rows.shape[1] * rows.element_size() % 16 == 0


def check_weights(weights: Tensor) -> None:
    """Refuse probabilities that the kernels do not take."""
    assert weights.dtype == torch.float32, f"probabilities in {weights.dtype}"
    assert weights.is_contiguous(), "probabilities must be contiguous"
