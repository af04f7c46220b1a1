"""The kernels that ring attention runs on packed tensors between its steps (``thd_*``).

A rank holds two chunks of each sample, one after the other; they are the halves here.
``cu_seqlens`` are the bounds of the rank's parts of samples, padding included.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Return the rows of the first (0) or second (1) chunk of every sample."""
    rows = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        middle = (start + stop) // 2
        rows.append(torch.arange(start, middle) if half == 0 else torch.arange(middle, stop))
    return torch.cat(rows)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """Take one half: (t, ...) to (t / 2, ...), or stacked keys and values with 2 in front."""
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
    """Merge a step's log-sum-exp, (heads, t / 2), into the second chunks of `lse`, (heads, t)."""
    assert packed
    rows = _half(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], step[:, : len(rows)])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    """Take the second chunks: (heads, t) to (heads, `length`)."""
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
    """Merge a step's output, (t, heads, D), into the output of earlier steps."""
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
    """Add a step's gradient to each chunk, copy it there, zero the chunk or (``none``) leave it."""
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
    """Return the position in the sequence of every token, ordered rank by rank.

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
    """Reorder (total, ...) from rank by rank to the order of the sequence."""
    result = torch.empty_like(x)
    result[_sequence_rows(cu_seqlens, cp_size)] = x
    return result


def thd_sequence_order_to_cp_rank_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int
) -> Tensor:
    """Reorder (total, ...) from the order of the sequence to rank by rank."""
    return x[_sequence_rows(cu_seqlens, cp_size)]


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    target: Tensor, split: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy each sample's tokens, padding left out; both tensors have them at the same rows."""
    lengths = cu_seqlens.diff().tolist()
    for start, length in zip(cu_seqlens_padded.tolist(), lengths, strict=False):
        target[start : start + length] = split[start : start + length]
