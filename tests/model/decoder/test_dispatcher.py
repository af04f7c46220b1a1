"""Our dispatcher of tokens gives the experts' outputs that Megatron's gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.dispatcher import GatheringDispatcher
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

TOKENS, PADDING = 7, 2
preprocess = MoEAlltoAllTokenDispatcher.preprocess


def count_rows(self: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> Tensor:
    """Do as VERL's patch of Megatron does: count the rows, which may be fewer."""
    counts: Tensor = preprocess(self, routing_map)
    self.num_out_tokens = routing_map.sum()
    return counts


def outputs_and_gradients(replays: bool) -> list[list[Tensor]]:
    """Run a layer's experts with each dispatcher; return the outputs and the tokens' gradients.

    Args:
        replays: whether routes are replayed. One token, which is padding, then has one expert for
            ours, and for Megatron's further ones with the weight 0.
    """
    initialize(Layout())
    architecture = Architecture.from_hf(tiny_config(moe=True))
    (chunk,) = build_chunks(architecture, Layout(), moe_enable_routing_replay=replays)
    experts: Any = chunk.decoder.layers[-1].mlp
    assert type(experts.token_dispatcher) is GatheringDispatcher
    torch.manual_seed(3)
    count, most = architecture.num_experts, architecture.num_experts_per_tok
    chosen = torch.stack([torch.randperm(count)[:most] for _ in range(TOKENS)])
    routes = torch.zeros(TOKENS, count, dtype=torch.bool).scatter_(1, chosen, value=True)
    weights = torch.rand(TOKENS, count) * routes
    fewer = routes.clone()
    if replays:
        fewer[PADDING, chosen[PADDING, 1:]] = False
        weights[PADDING, chosen[PADDING, 1:]] = 0.0
        MoEAlltoAllTokenDispatcher.preprocess = count_rows
    states = torch.randn(TOKENS, 1, architecture.hidden_size)
    found = []
    for kind, named in ((GatheringDispatcher, fewer), (MoEAlltoAllTokenDispatcher, routes)):
        experts.token_dispatcher.__class__ = kind
        experts.router.forward = lambda *_, named=named, **__: (weights, named)
        tokens = states.clone().requires_grad_()
        output, _ = experts(tokens)
        output.square().sum().backward()
        assert tokens.grad is not None
        found.append([output.detach(), tokens.grad])
    return found


@pytest.mark.parametrize("replays", [False, True])
def test_it_gives_what_megatrons_gives(replays: bool) -> None:
    ((ours, theirs),) = run_layout(outputs_and_gradients, 1, replays)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)
