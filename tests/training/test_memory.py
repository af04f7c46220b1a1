"""The estimate of memory agrees with sums by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.log_probs import CHUNK_BYTES
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.training import memory

DENSE, TIED = Architecture.from_hf(tiny_config()), Architecture.from_hf(tiny_config(tie=True))
MOE = Architecture.from_hf(tiny_config(moe=True))
MIXED = Architecture.from_hf(tiny_config(moe=True, text={"mlp_only_layers": [1]}))
HYBRID = Architecture.from_hf(tiny_config(family="qwen3.5"))
HYBRID_MOE = Architecture.from_hf(tiny_config(family="qwen3.5", moe=True))


def estimate(*args: Any, **kwargs: Any) -> memory.Memory:
    """Return the estimate of the fullest rank."""
    return max(memory.estimate_stages(*args, **kwargs), key=lambda stage: stage.total)


@pytest.mark.parametrize(
    ("a", "layout", "mtp"),
    [
        (DENSE, "single", False),
        (DENSE, "pp2", False),
        (TIED, "single", False),
        (TIED, "pp2", False),
        (MOE, "tp2+sp", False),
        (MOE, "ep2xdp2", False),
        (MIXED, "pp2", False),
        (HYBRID, "pp2", False),
        (HYBRID_MOE, "tp2+sp", False),
        (HYBRID, "tp2+sp", True),
        (HYBRID_MOE, "ep2xdp2", True),
    ],
)
def test_memory_counts_the_parameters_that_ranks_hold(
    a: Architecture, layout: str, mtp: bool
) -> None:
    chosen = Layout.parse(layout)
    ranks = run_layout(held_parameters, chosen.world_size, a, chosen, mtp)
    estimates = memory.estimate_stages(a, chosen, 128, mtp=mtp)
    held = {memory.WEIGHT * count for count in ranks}
    assert {estimate.weights for estimate in estimates} == held


def held_parameters(a: Architecture, layout: Layout, mtp: bool) -> int:

    initialize(layout)
    (model,) = build_chunks(a, layout, **({"mtp_num_layers": 1} if mtp else {}))
    return sum(p.numel() for p in model.parameters())


def test_states_are_divided_over_the_ranks_that_hold_the_same_weights() -> None:
    a = Architecture.from_hf(PUBLISHED / "30b_a3b.json")
    one = estimate(a, Layout(ep=8, dp=8), 8192)
    more = estimate(a, Layout(ep=8, dp=32), 8192)
    everywhere = parameters.count_by_kind(a)["experts"]
    shared, experts = parameters.total(a) - everywhere, everywhere / 8
    assert one.weights == more.weights == 2 * (shared + experts)
    assert one.optimizer == pytest.approx(12 * (shared / 8 + experts))
    assert more.optimizer == pytest.approx(12 * (shared / 32 + experts / 4))


def test_a_chunk_of_logits_is_alive_where_it_takes_more_than_a_layers_gradients() -> None:
    a = Architecture.from_hf(PUBLISHED / "8b.json")
    assert estimate(a, Layout(), 8).temporary == 8 * a.vocab_size * memory.LOGIT
    assert estimate(a, Layout(tp=2, sp=True), 8192).temporary == CHUNK_BYTES
    # Of gate, up and their product, which is recomputed, and three of the residual stream.
    gradients = memory.ACTIVATION * 8192 * (4 * a.intermediate_size + 3 * a.hidden_size)
    assert estimate(a, Layout(), 8192).temporary == gradients > CHUNK_BYTES


def test_recompute_and_parallelism_shrink_activations_as_they_should() -> None:
    a = Architecture.from_hf(PUBLISHED / "8b.json")
    text = partial(estimate, a, visual_share=0.0)
    plain = text(Layout(), 8192)
    halved = text(Layout(tp=2, sp=True), 8192)
    assert halved.activations == pytest.approx(plain.activations / 2)
    assert text(Layout(cp=2), 8192).activations == pytest.approx(plain.activations / 2)
    full = text(Layout(), 8192, "full")
    inputs = 2 * a.hidden_size * 8192 * a.num_hidden_layers
    whole = text(Layout(), 8192, "none")
    assert whole.activations > 1.4 * plain.activations
    one_layer = whole.activations / a.num_hidden_layers
    assert full.activations == pytest.approx(inputs)
    first = text(Layout(), 8192, 12)
    assert first.activations == pytest.approx(inputs / 3 + 24 * one_layer)
    # A recomputed layer has its activations while its gradients are computed.
    for recomputed in (full, first):
        assert recomputed.temporary == pytest.approx(whole.temporary + one_layer)


def test_rows_of_experts_are_kept_once() -> None:
    """Rehearsals of `sft_30b_a3b` with 32 and 33 recomputed layers are 0.462 GB apart."""
    a = Architecture.from_hf(PUBLISHED / "30b_a3b.json")
    layout = Layout(tp=2, ep=8, dp=8, sp=True)
    kept = [estimate(a, layout, 8192, count, visual_share=0.0).activations for count in (24, 25)]
    assert kept[0] - kept[1] == pytest.approx(0.462e9, rel=0.03)


@pytest.mark.parametrize(
    ("layout", "stage", "kept", "most"),
    [
        ("single", 0, [1], 1),
        ("pp4", 0, [1], 4),
        ("pp4", 3, [1], 1),
        ("pp4xvpp2", 0, [0.5, 0.5], 5.5),
        ("pp4xvpp2", 3, [0.5, 0.5], 2.5),
        # The first virtual stage forwards eight micro-batches before the first backward.
        ("pp4xvpp2", 0, [1, 0], 8),
        ("pp4xvpp2", 0, [0, 1], 4),
    ],
)
def test_what_a_rank_keeps_in_flight(
    layout: str, stage: int, kept: list[float], most: float
) -> None:
    assert memory.most_in_flight(Layout.parse(layout), stage, kept) == most
