"""The order of tokens by expert, and the sums of each token's rows.

Megatron sorts the whole table of tokens and experts, and adds rows to tokens in their own dtype by
a scatter. Its fused permutation is Transformer Engine's, for the ``te`` spec.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_qwen3vl import kernels
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's

MOST_EXPERTS = 1024


class Order(NamedTuple):
    """Rows in the order of experts, and for each expert in that of tokens."""

    tokens: Tensor  # (n,) int64: the token of each row
    entries: Tensor  # (n,) int64: its place in the flattened table (T, E)
    rows: Tensor  # (T, k) int64: the rows of each token, in the order of experts; -1: none
    counts: Tensor  # (E,) int64: the number of each expert's rows


def fits(tokens: Tensor, experts: int) -> bool:
    """Return whether the kernels take `tokens` (T, H) of this many experts."""
    return kernels.fits(tokens) and experts <= MOST_EXPERTS


def order_by_expert(chosen: Tensor, most: int, count: int) -> Order:
    """Order the tokens of each expert, without a host sync.

    Args:
        chosen: (T, E) bool, whether an expert takes a token.
        most: the most experts of a token, k.
        count: the number of rows n, as many as the chosen pairs.
    """
    counting = kernels.run_on(chosen) and chosen.shape[1] <= MOST_EXPERTS
    function = _operators().order_by_expert if counting else order_by_expert_eagerly
    return Order(*function(chosen, most, count))


def sum_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return the sums (T, H) of the rows of each token, computed in float32 and rounded once.

    Args:
        values: (n, H), bf16, fp16 or float32.
        rows: :attr:`Order.rows`.
    """
    function = _operators().sum_rows if kernels.run_on(values) else sum_rows_eagerly
    sums: Tensor = function(values, rows)
    return sums


def zero_empty(gradients: Tensor, counts: Tensor) -> None:
    """Zero, in place and without a host sync, the matrices of `gradients` whose count is zero.

    Args:
        gradients: (E, ...), contiguous.
        counts: (E,) int64, on the same device.
    """
    if kernels.run_on(gradients) and gradients.is_contiguous():
        _operators().zero_empty(gradients, counts)
    else:
        zero_empty_eagerly(gradients, counts)


@cache
def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import permutation_triton  # importing Triton takes a second

    permutation_triton.order_on_host(order_by_expert_eagerly)
    return permutation_triton.OPERATORS


def order_by_expert_eagerly(
    chosen: Tensor, most: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what :func:`order_by_expert` does, by a sort."""
    (tokens, experts), counts = chosen.shape, chosen.sum(0)
    by_expert = chosen.t().reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)
    by_expert = by_expert[:count]
    of_token, expert = by_expert % tokens, by_expert // tokens
    place = chosen.long().cumsum(1) - 1  # of an expert among those of the token
    rows = torch.full((tokens, most), -1, dtype=torch.int64, device=chosen.device)
    rows[of_token, place[of_token, expert]] = torch.arange(count, device=chosen.device)
    return of_token, of_token * experts + expert, rows, counts


def sum_rows_eagerly(values: Tensor, rows: Tensor) -> Tensor:
    """Do what :func:`sum_rows` does, in four kernels."""
    of_tokens = values[rows.clamp(min=0)].float()  # (T, k, H)
    return of_tokens.mul_((rows >= 0)[..., None]).sum(1).to(values.dtype)


def zero_empty_eagerly(gradients: Tensor, counts: Tensor) -> None:
    """Do what :func:`zero_empty` does, in a kernel that reads and writes all of them."""
    gradients.masked_fill_((counts == 0).view(-1, *[1] * (gradients.ndim - 1)), 0)
