"""Padding counts in no loss of the router; ``verify/parity`` checks the losses themselves."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from tests.model.engine import TOLERANCE, Case, References, build, train_step, wrap
from tests.model.reference import Expected
from tests.model.samples import MicroBatch, packed, padded, sample
from tests.turns import slow

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
    # Megatron's z-loss is the mean over ranks of each rank's mean. Where SP or CP divide tokens
    # and padding unevenly, it therefore weighs tokens unevenly, in any model.
    [
        ("single", AUX | Z),
        *slow(("tp2xep2+sp", AUX), ("cp2xep2", AUX)),
    ],
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
