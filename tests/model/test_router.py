"""Padding counts in no loss of the router, and the router's losses follow their definitions."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from tests.model.engine import TOLERANCE, Case, References, build, train_step, wrap
from tests.model.reference import Expected
from tests.model.samples import MicroBatch, packed, padded, sample
from tests.model.weights import TEXT

AUX, Z = {"moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.05}


def _gradients(case: Case) -> dict[str, Tensor]:
    chunks = build(case)
    train_step(case, wrap(case, chunks))
    (chunk,) = chunks
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}


def gradients(
    reference: Any, batches: list[MicroBatch], layout: str, overrides: dict[str, Any], tokens: float
) -> list[dict[str, Tensor]]:
    expected = Expected([], tokens, 0.0, {})
    case = Case(Layout.parse(layout), reference, [batches], expected, overrides=overrides)
    return run_layout(_gradients, case.layout.world_size, case, timeout=60)


@pytest.mark.parametrize(
    ("layout", "losses"),
    # Megatron's z-loss is the mean over ranks of each rank's mean, so that where SP or CP cut
    # tokens and padding unevenly it weighs tokens unevenly, whoever the model is.
    [("single", AUX | Z), ("tp2xep2+sp", AUX), ("cp2xep2", AUX)],
)
def test_padding_does_not_count(reference: References, layout: str, losses: dict[str, Any]) -> None:
    hf = reference(moe=True)
    a = hf.architecture
    samples = [sample(a, 24, [("image", 1, 4, 6)], seed=1), sample(a, 16, seed=2)]
    tokens = sum(float(s.loss_mask.sum()) for s in samples)
    compact = gradients(hf, [packed(a, samples, 4)], layout, losses, tokens)
    for batch in (packed(a, samples, 4, tail=24), padded(a, samples, 32)):
        for rank, without in zip(
            gradients(hf, [batch], layout, losses, tokens), compact, strict=True
        ):
            for name, gradient in rank.items():
                difference = (gradient - without[name]).abs().max() / without[name].abs().max()
                assert difference <= TOLERANCE, name


def test_the_auxiliary_loss_is_hugging_faces(reference: References) -> None:
    """One micro-batch on one rank, where the definitions agree but for a factor.

    HF pools the tokens of all layers before it multiplies the two averages, Megatron adds a loss
    for each layer; so one layer of a time is compared, of whose router each sees the same.
    """
    hf = reference(moe=True, text={"num_hidden_layers": 1}, vision={"deepstack_visual_indexes": []})
    a = hf.architecture
    s = sample(a, 32, [("image", 1, 4, 6)], seed=3)
    coefficient, tokens = 0.1, float(s.loss_mask.sum())
    with_loss, without = (
        gradients(hf, [padded(a, [s], 32)], "single", {"moe_aux_loss_coeff": c}, tokens)[0]
        for c in (coefficient, 0.0)
    )
    hf.model.zero_grad()
    output = hf.model(
        input_ids=s.input_ids, position_ids=s.position_ids, output_router_logits=True, **s.media
    )
    loss = load_balancing_loss_func(output.router_logits, a.num_experts, a.num_experts_per_tok)
    # HF counts each of the k choices of a token, Megatron divides by k.
    (coefficient * loss / a.num_experts_per_tok).backward()
    name = "decoder.layers.0.mlp.router.weight"
    expected = hf.model.get_parameter(f"{TEXT}layers.0.mlp.gate.weight").grad
    difference = with_loss[name] - without[name] - expected
    assert difference.abs().max() <= TOLERANCE * with_loss[name].abs().max()
    assert expected.abs().max() > 0.01 * with_loss[name].abs().max()
