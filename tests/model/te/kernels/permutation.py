"""The Triton kernels that send tokens to their experts and back, and sort chunks of tokens.

A row map, (tokens, 2 * experts + 1), holds for each token: its rows among the permuted ones,
highest first; from column `experts` on, the expert of each; in the last column, their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNUSED = -7
"""The value of those entries of a row map that the kernel does not write."""


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the row map of (tokens, experts); rows count expert by expert, then by token."""
    chosen = routing_map.bool()
    rows = chosen.T.flatten().cumsum(0).view(num_experts, num_tokens).T - 1
    result = torch.full((num_tokens, 2 * num_experts + 1), UNUSED, dtype=torch.int32)
    for token in range(num_tokens):
        experts = chosen[token].nonzero()[:, 0].flip(0)
        count = len(experts)
        result[token, :count] = rows[token, experts]
        result[token, num_experts : num_experts + count] = experts
        result[token, -1] = count
    return result


def _entries(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token, the permuted row and the expert of every choice."""
    counts = row_id_map[:, -1].long()
    tokens = torch.arange(len(row_id_map)).repeat_interleave(counts)
    place = torch.cat([torch.arange(int(n)) for n in counts]) if len(counts) else tokens
    return (
        tokens,
        row_id_map[tokens, place].long(),
        row_id_map[tokens, num_experts + place].long(),
    )


def permute_with_mask_map(
    tokens: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, None, Tensor | None]:
    """Return permuted tokens (rows, H) and, given `probs` (tokens, experts), theirs (rows,)."""
    assert scale is None
    token, row, expert = _entries(row_id_map, num_experts)
    if pad_offsets is not None:
        row = row + pad_offsets[expert]
    filler = torch.nan if pad_offsets is None else 0.0
    output = tokens.new_full((num_out_tokens, hidden_size), filler)
    output[row] = tokens[token]
    if probs is None:
        return output, None, None
    permuted = probs.new_full((num_out_tokens,), filler)
    permuted[row] = probs[token, expert]
    output[row] = torch.where((permuted[row] == 0)[:, None], 0.0, output[row])
    return output, None, permuted


def unpermute_with_mask_map(
    rows: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum each token's rows, (tokens, H); given `permuted_probs`, return (tokens, experts) too."""
    token, row, expert = _entries(row_id_map, num_experts)
    if pad_offsets is not None:
        row = row + pad_offsets[expert]
    values = rows[row]
    if merging_probs is not None:
        values = values * merging_probs[token, expert][:, None]
    output = rows.new_zeros(num_tokens, hidden_size).index_add_(0, token, values.to(rows.dtype))
    if permuted_probs is None:
        return output, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[token, expert] = permuted_probs[row]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    grad: Tensor,
    row_id_map: Tensor,
    rows: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the probabilities."""
    token, row, expert = _entries(row_id_map, num_experts)
    if pad_offsets is not None:
        row = row + pad_offsets[expert]
    to_rows = grad.new_full((num_out_tokens, hidden_size), torch.nan if pad_offsets is None else 0)
    to_rows[row] = grad[token] * merging_probs[token, expert][:, None]
    to_probs = torch.zeros_like(merging_probs)
    to_probs[token, expert] = (rows[row] * grad[token]).sum(-1)
    return to_rows, to_probs


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Return the row of each token, (tokens,), with the chunks in the order of `sorted_indices`."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    order = torch.cat([chunks[i] for i in sorted_indices.tolist()])
    return order.argsort().int()


def sort_chunks_by_map(
    rows: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sort `rows`, or put them back if ``is_forward`` is False."""
    source = row_id_map.long()
    if is_forward:
        source = source.argsort()
    return rows[source], None if probs is None else probs[source]
