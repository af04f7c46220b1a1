"""What ring attention does to packed tensors between its steps (``thd_*``).

A rank holds two chunks of each sample, one after the other; the halves are those.
``cu_seqlens`` are the rank's bounds of samples, padding included.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first (0) or second (1) chunk of every sample."""
    rows = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        middle = (start + stop) // 2
        rows.append(torch.arange(start, middle) if half == 0 else torch.arange(middle, stop))
    return torch.cat(rows)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """(t, ...) -> (t / 2, ...), or (2, t, ...) -> (2, t / 2, ...) of keys and values together."""
    tokens = tensor.ndim - 3
    result = torch.full_like(
        tensor.narrow(tokens, 0, tensor.shape[tokens] // 2),
        torch.nan,
        memory_format=torch.contiguous_format,
    )
    rows = _half(cu_seqlens, half)
    result.narrow(tokens, 0, len(rows)).copy_(tensor.index_select(tokens, rows))
    return result


def thd_second_half_lse_correction(
    lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool
) -> None:
    """Add what a step saw for the second chunks; (heads, t) and (heads, t / 2)."""
    assert packed
    rows = _half(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], step[:, : len(rows)])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    """(heads, t) -> (heads, `length`)."""
    assert packed
    rows = _half(cu_seqlens, 1)
    result = torch.full((len(lse), length), torch.nan, dtype=lse.dtype)
    result[:, : len(rows)] = lse[:, rows]
    return result


def thd_out_correction(
    out: Tensor,
    step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    step_lse: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    """Merge a step's output, (t, heads, D), into that of the steps before."""
    assert packed
    end = int(cu_seqlens[-1])
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(end)
    own = step.view(-1, *out.shape[-2:])[: len(rows)]
    before = (old_lse - lse)[:, rows].exp().T[..., None]
    now = (step_lse[:, : len(rows)] - lse[:, rows]).exp().T[..., None]
    out[rows] = out[rows] * before + own * now


def thd_grad_correction(
    grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str
) -> None:
    """Add a step's gradient into, or write it over, the chunks; ``none`` leaves them."""
    both = "none" not in (first, second) and "zero" not in (first, second)
    for half, action in enumerate((first, second)):
        rows = _half(cu_seqlens, half)
        own = step[rows] if both else step[: len(rows)]
        if action == "add":
            grad[rows] += own
        elif action == "copy":
            grad[rows] = own
        elif action == "zero":
            grad[rows] = 0


def _sequence_rows(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Places in the sequence, in the order in which the ranks' tokens lie one rank after another.

    A sample is cut into 2 * `cp_size` chunks, and rank r holds chunks r and 2 * `cp_size` - 1 - r.
    """
    rows = []
    for rank in range(cp_size):
        for start, stop in pairwise(cu_seqlens.tolist()):
            chunks = torch.arange(start, stop).chunk(2 * cp_size)
            rows += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    return torch.cat(rows)


def thd_cp_rank_order_to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int
) -> Tensor:
    """(total, ...), ranks one after another -> in the order of the sequence."""
    result = torch.empty_like(x)
    result[_sequence_rows(cu_seqlens, cp_size)] = x
    return result


def thd_sequence_order_to_cp_rank_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int
) -> Tensor:
    """The inverse."""
    return x[_sequence_rows(cu_seqlens, cp_size)]


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    target: Tensor, split: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy each sample's tokens, which lie at the same rows of both."""
    lengths = cu_seqlens.diff().tolist()
    for start, length in zip(cu_seqlens_padded.tolist(), lengths, strict=False):
        target[start : start + length] = split[start : start + length]
