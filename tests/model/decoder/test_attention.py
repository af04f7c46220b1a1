"""Which keys a query may see."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_qwen3vl.model.decoder.attention import PackedSequence, _mask, causal_segments

CPU = torch.device("cpu")


def test_every_query_sees_something_and_no_token_sees_padding() -> None:
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()
    mask = _mask(4, 4, valid)
    assert mask is not None
    assert mask.any(-1).all(), "a row without any key is NaN in some kernels"
    expected = torch.ones(4, 4).tril().bool() & valid[:, None, :]
    assert torch.equal(mask[:, 0][valid], expected[valid])


def test_segments_without_cp_are_the_samples() -> None:
    segments = causal_segments((0, 4, 4, 12), 1, 0, CPU)
    assert segments.query_lengths == segments.key_lengths == (4, 8)
    assert segments.key_rows is None


def test_segments_under_cp_end_at_the_last_query() -> None:
    """Rank 0 of 2 holds positions 0 and 3 of the first sample, and 4, 5, 10, 11 of the second."""
    segments = causal_segments((0, 4, 12), 2, 0, CPU)
    assert segments.query_lengths == (1, 1, 2, 2)
    assert segments.key_lengths == (1, 4, 2, 8)
    assert segments.key_rows is not None
    arriving = torch.tensor([0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9])  # positions, rank by rank
    keys = arriving[segments.key_rows].split(segments.key_lengths)
    assert [k.tolist() for k in keys] == [[0], [0, 1, 2, 3], [4, 5], list(range(4, 12))]


def test_cumulative_lengths_for_the_varlen_kernel() -> None:
    queries, keys = causal_segments((0, 4, 12), 2, 0, CPU).cu_seqlens(CPU)
    assert queries.tolist() == [0, 1, 2, 4, 6]
    assert keys.tolist() == [0, 1, 5, 7, 15]
    assert queries.dtype == keys.dtype == torch.int32


def test_padding_that_ends_a_sample_is_attended_to_as_a_part_of_it() -> None:
    """Were it told of the padding, TE's ring attention would read memory that no kernel wrote."""
    bounds = torch.tensor([0, 8, 24], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 5, 18], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 5, 18], dtype=torch.int32),
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=13,
        max_seqlen_kv=13,
    )
    packed = PackedSequence.from_params(params, CPU)
    assert packed.bounds == (0, 8, 24)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 8, 24]
    assert packed.cu_seqlens_q_padded is packed.cu_seqlens_kv_padded is None
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 16
