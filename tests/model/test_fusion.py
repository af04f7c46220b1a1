"""What parity with Hugging Face does not show of fused features: dtypes, and ranks without any."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.model.decoder.layer import add_to_rows
from mcore_qwen3vl.model.qwen3vl import fuse, plan_fusion

B, S, H = 3, 16, 5
MASK = torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.4
TOKEN_INDEX = torch.nonzero(MASK.flatten()).squeeze(1)
N = len(TOKEN_INDEX)


@pytest.mark.parametrize("token_index", [None, torch.tensor([1, 2])])
def test_features_without_a_local_row_still_get_a_gradient(token_index):
    """Without it the vision tower's backward, with its collectives, would not run on this rank."""
    plan = plan_fusion(token_index, torch.arange(8, 16), seq_len=S, batch_size=1)
    features = torch.randn(0 if token_index is None else 2, H, requires_grad=True)
    layer = torch.randn_like(features).requires_grad_()
    hidden = fuse(torch.randn(8, 1, H), features, plan)
    hidden = add_to_rows(hidden, plan.select(layer), plan.destination)
    hidden.sum().backward()
    for leaf in (features, layer):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_features_take_the_hidden_states_dtype():
    plan = plan_fusion(TOKEN_INDEX, torch.arange(S), seq_len=S, batch_size=B)
    hidden = fuse(torch.zeros(S, B, H, dtype=torch.bfloat16), torch.randn(N, H), plan)
    assert hidden.dtype == torch.bfloat16
    hidden = add_to_rows(hidden, plan.select(torch.randn(N, H)), plan.destination)
    assert hidden.dtype == torch.bfloat16
