"""The positions of the full sequence that a rank holds under CP, packing and SP.

Every rank receives full sequences and takes its own part. Only this module knows the order: token
and position ids, labels, visual features and rotary angles are all divided with it.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from mcore_qwen3vl.errors import BadInput


def local_positions(
    seq_len: int,
    *,
    cp_size: int,
    cp_rank: int,
    tp_size: int = 1,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the global positions that one rank holds, in the order in which it holds them.

    CP divides a sequence into ``2 * cp_size`` chunks and gives rank r the r-th from the start and
    the r-th from the end, so that causal attention costs every rank the same (mcore
    ``get_batch_on_this_cp_rank``). With packing, each sub-sequence is divided that way (Transformer
    Engine ``thd_get_partitioned_indices``). SP then takes a contiguous part of the CP rank's
    positions.

    Args:
        seq_len: S, the length of the full (or packed) sequence.
        cp_size, cp_rank: of the context-parallel group.
        tp_size, tp_rank: of the tensor-parallel group; used with `sequence_parallel` only.
        sequence_parallel: whether hidden states are divided over the TP group too.
        cu_seqlens: (samples + 1,) integers from 0 to `seq_len` on the host: bounds of the packed
            sub-sequences, padding included. None: one sequence.

    Returns:
        (S / cp,) int64 on the CPU, or (S / cp / tp,) with `sequence_parallel`.

    Raises:
        BadInput: a length cannot be divided so, or `cu_seqlens` does not cover `seq_len`.
    """
    if cu_seqlens is not None:
        _check_bounds(seq_len, cu_seqlens)
    positions = torch.arange(seq_len)
    if cp_size > 1:
        positions = positions[_cp_mask(seq_len, cp_size, cp_rank, cu_seqlens)]
    if sequence_parallel and tp_size > 1:
        if len(positions) % tp_size != 0:
            raise BadInput(
                f"Sequence parallelism cuts the {len(positions)} tokens of each CP rank "
                f"(sequence length {seq_len}, CP {cp_size}) into TP {tp_size} equal parts, which "
                f"is impossible: pad sequences to a multiple of {length_multiple(cp_size, tp_size)}"
                "."
            )
        positions = positions.chunk(tp_size)[tp_rank]
    return positions


def length_multiple(
    cp_size: int, tp_size: int = 1, sequence_parallel: bool = True, *, local: int = 1
) -> int:
    """Return the number that an unpacked sequence's length must be a multiple of.

    A rank's part of it is then a multiple of `local`. For the others see :func:`local_positions`.
    """
    zigzag = 2 * cp_size if cp_size > 1 else 1
    shards = cp_size * (tp_size if sequence_parallel else 1)
    return lcm(zigzag, shards * local)


def check_shapes(input_ids: Tensor, position_ids: Tensor, *, packed: bool) -> None:
    """Check the shapes of a micro-batch.

    Raises:
        BadInput: shapes do not agree.
    """
    batch, seq_len = input_ids.shape
    if position_ids.shape != (3, batch, seq_len):
        raise BadInput(
            f"position_ids have shape {tuple(position_ids.shape)}; Qwen3-VL needs time, height and "
            f"width for each of the {batch} x {seq_len} tokens: (3, {batch}, {seq_len})."
        )
    if packed and batch != 1:
        raise BadInput(f"A packed micro-batch has one row; input_ids have {batch}.")


def require_right_padding(padding: Tensor) -> None:
    """Refuse padding on the left, from which causal attention does not keep the tokens.

    For a mask on a device the check is a device-side assertion, which takes no host sync. If it
    fails, the process cannot use CUDA any more. `padding` is (B, S) bool, True for padding.

    Raises:
        BadInput: there is padding before a token, in a tensor on the host.
    """
    right = (padding[:, 1:] >= padding[:, :-1]).all()
    refusal = "The te spec takes padding on the right only: pad there, or use the torch spec."
    if padding.is_cuda:
        torch._assert_async(right, refusal)
    elif not right:
        raise BadInput(refusal)


def _cp_mask(seq_len: int, cp_size: int, cp_rank: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return (S,) bool: True in the rank's two chunks of every sub-sequence."""
    bounds = torch.tensor([0, seq_len]) if cu_seqlens is None else cu_seqlens.long()
    lengths = bounds.diff()
    odd = lengths[lengths % (2 * cp_size) != 0]
    if len(odd):
        raise BadInput(
            f"CP {cp_size} cuts every {'sequence' if cu_seqlens is None else 'packed sample'} into "
            f"{2 * cp_size} equal chunks, but one has length {int(odd[0])}: pad lengths to a "
            f"multiple of {2 * cp_size}."
        )
    offset = torch.arange(seq_len) - torch.repeat_interleave(bounds[:-1], lengths)
    chunk = offset * (2 * cp_size) // torch.repeat_interleave(lengths, lengths)
    return (chunk == cp_rank) | (chunk == 2 * cp_size - 1 - cp_rank)


def _check_bounds(seq_len: int, cu_seqlens: Tensor) -> None:
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if (first, last) != (0, seq_len) or bool((cu_seqlens.diff() < 0).any()):
        raise BadInput(
            f"cu_seqlens runs from {first} to {last} over a packed sequence of {seq_len} tokens: "
            "it must rise from 0 to the full length, so make the tail padding a sample of its own."
        )
