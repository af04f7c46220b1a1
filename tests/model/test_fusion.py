"""Fusing by index equals Hugging Face's masked scatter and masked add."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.model.decoder.layer import add_features
from mcore_qwen3vl.model.inputs import local_positions
from mcore_qwen3vl.model.qwen3vl import fuse, plan_fusion

B, S, H = 3, 16, 5
MASK = torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.4
TOKEN_INDEX = torch.nonzero(MASK.flatten()).squeeze(1)
N = len(TOKEN_INDEX)

RANKS = {
    "single": [{"cp_size": 1, "cp_rank": 0}],
    "cp2": [{"cp_size": 2, "cp_rank": r} for r in range(2)],
    "cp2 tp2 sp": [
        {"cp_size": 2, "cp_rank": c, "tp_size": 2, "tp_rank": t, "sequence_parallel": True}
        for c in range(2)
        for t in range(2)
    ],
}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_equals_masked_scatter_and_masked_add(ranks):
    text = torch.randn(B, S, H)
    features, added = torch.randn(N, H), torch.randn(N, H)
    fused = text.masked_scatter(MASK[..., None], features)
    stacked = fused.clone()
    stacked[MASK] += added
    for rank in ranks:
        positions = local_positions(S, **rank)
        plan = plan_fusion(TOKEN_INDEX, positions, seq_len=S, batch_size=B)
        local = fuse(text.transpose(0, 1)[positions], features, plan)
        assert torch.equal(local, fused.transpose(0, 1)[positions])
        local = add_features(local, plan.select(added), plan.destination)
        assert torch.equal(local, stacked.transpose(0, 1)[positions])


def test_images_and_videos_in_one_sample_keep_their_own_order():
    """Features of images come first, though their placeholders may alternate with a video's."""
    token_index = torch.tensor([2, 7, 4])  # two images' placeholders around a video's
    plan = plan_fusion(token_index, torch.arange(8), seq_len=8, batch_size=1)
    features = torch.tensor([[1.0], [2.0], [9.0]])
    fused = fuse(torch.zeros(8, 1, 1), features, plan)
    assert fused.flatten().tolist() == [0, 0, 1, 0, 9, 0, 0, 2]


@pytest.mark.parametrize("token_index", [None, torch.tensor([1, 2])])
def test_features_without_a_local_row_still_get_a_gradient(token_index):
    """Without it the vision tower's backward, with its collectives, would not run on this rank."""
    plan = plan_fusion(token_index, torch.arange(8, 16), seq_len=S, batch_size=1)
    features = torch.randn(0 if token_index is None else 2, H, requires_grad=True)
    layer = torch.randn_like(features).requires_grad_()
    hidden = fuse(torch.randn(8, 1, H), features, plan)
    hidden = add_features(hidden, plan.select(layer), plan.destination)
    hidden.sum().backward()
    for leaf in (features, layer):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_text_embeddings_under_placeholders_get_no_gradient():
    text = torch.randn(S, B, H, requires_grad=True)
    plan = plan_fusion(TOKEN_INDEX, torch.arange(S), seq_len=S, batch_size=B)
    fuse(text, torch.randn(N, H), plan).sum().backward()
    assert text.grad is not None
    assert torch.equal(text.grad[..., 0] == 0, MASK.T)


def test_features_take_the_hidden_states_dtype():
    plan = plan_fusion(TOKEN_INDEX, torch.arange(S), seq_len=S, batch_size=B)
    hidden = fuse(torch.zeros(S, B, H, dtype=torch.bfloat16), torch.randn(N, H), plan)
    assert hidden.dtype == torch.bfloat16
    hidden = add_features(hidden, plan.select(torch.randn(N, H)), plan.destination)
    assert hidden.dtype == torch.bfloat16
