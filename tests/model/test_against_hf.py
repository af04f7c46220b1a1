"""Logits, loss and all gradients equal Hugging Face's, by a check that shares no code with ours.

``verification/parity`` compares all layouts and batches. These check its tools: weights are
cut by hand-written rules instead of the conversion table, and positions, labels and loss masks are
random, so that nothing holds by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.runtime.launch import run_layout
from tests.model.engine import TOLERANCE, Case, References, build, check, train_step, wrap
from tests.model.reference import Expected, Reference
from tests.model.samples import Media, MicroBatch, Sample, packed, padded, sample
from tests.turns import slow

IMAGES: list[Media] = [("image", 1, 4, 6), ("image", 1, 6, 2)]
VIDEO: list[Media] = [("video", 2, 4, 4)]
BOTH: list[Media] = [("image", 1, 4, 4), ("video", 2, 2, 4)]

Batches = tuple[list[Sample], list[list[MicroBatch]]]
"""All samples, and the micro-batches of each data-parallel rank, in the order of the samples."""


def samples(reference: Reference, *lengths: int) -> list[Sample]:
    """Make samples with images, text alone, a video, both, and so on in turn."""
    media = [IMAGES, [], VIDEO, BOTH]
    return [
        sample(reference.architecture, n, media[i % 4], seed=20 + i) for i, n in enumerate(lengths)
    ]


def even(reference: Reference, dp: int) -> Batches:
    """Make two micro-batches a rank, each of two samples of one length."""
    made = samples(reference, *[32] * 4 * dp)
    pairs = [padded(reference.architecture, made[i : i + 2], 32) for i in range(0, len(made), 2)]
    return made, [pairs[2 * rank : 2 * rank + 2] for rank in range(dp)]


def left(reference: Reference, dp: int) -> Batches:
    """Make two micro-batches of two samples, padded on the left."""
    made = samples(reference, 29, 19, 32, 23)
    return made, [[padded(reference.architecture, made[i : i + 2], 32, left=True) for i in (0, 2)]]


def tail(reference: Reference, dp: int) -> Batches:
    """Make packs with padding at the tail and, as CP requires, in each sample."""
    made = samples(reference, 29, 13, 24, 29)
    a = reference.architecture
    return made, [[packed(a, made[:3], 8, tail=16), packed(a, made[3:], 8, tail=56)]]


UNIFORM_2 = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2
}  # fmt: skip
CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "features land on their tokens with two samples a micro-batch": ("single", even, {}, {}),
    "each SP rank adds its DeepStack rows once": ("tp2+sp", even, {}, {}),
    "features gathered over CP, padding at a pack's tail": ("cp2", tail, {}, {}),
    "interleaved pipeline, tied": ("pp2xvpp2", even, {"tie": True}, {}),
    "padding is routed to no expert": ("tp2xep2+sp", tail, {"moe": True}, {}),
    "recompute of two layers keeps DeepStack": ("tp2xcp2+sp", left, {}, UNIFORM_2),
    "eight ranks": ("tp2xpp2xvpp2xep2xcp2+sp", even, {"moe": True}, {}),
}
SLOW = ("recompute of two layers keeps DeepStack", "eight ranks")


def cases(named: dict[str, tuple[Any, ...]], slow: tuple[str, ...]) -> list[Any]:
    """Return the parameters of these cases: layout, batches, model and overrides."""
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, case in named.items()
    ]


@pytest.mark.parametrize(("layout", "batches", "model", "overrides"), cases(CASES, SLOW))
def test_equals_hugging_face(
    reference: References, layout: str, batches: Any, model: dict[str, Any], overrides: Any
) -> None:
    compare(reference, layout, batches, model, overrides)


def compare(
    reference: References,
    layout: str,
    batches: Callable[[Reference, int], Batches],
    model: dict[str, Any],
    overrides: dict[str, Any],
    kind: Any = Qwen3VLModel,
) -> None:
    hf, sizes = reference(**model), Layout.parse(layout)
    samples, of_ranks = batches(hf, sizes.dp)
    check(Case(sizes, hf, of_ranks, hf.expect(samples), overrides=overrides, kind=kind))


AUX, Z = {"moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.05}


def _gradients(case: Case) -> dict[str, Tensor]:
    chunks = build(case)
    train_step(case, wrap(chunks))
    (chunk,) = chunks
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}


def gradients(
    reference: Any, batches: list[MicroBatch], layout: str, overrides: dict[str, Any], tokens: float
) -> list[dict[str, Tensor]]:
    expected = Expected([], tokens, 0.0, {})
    case = Case(Layout.parse(layout), reference, [batches], expected, overrides=overrides)
    return run_layout(_gradients, case.layout.world_size, case, timeout=60)


@pytest.mark.parametrize("layout", ["single", *slow("tp2xep2+sp", "cp2xep2")])
def test_padding_counts_in_no_loss_of_the_router(reference: References, layout: str) -> None:
    hf = reference(moe=True)
    a = hf.architecture
    samples = [sample(a, 24, [("image", 1, 4, 6)], seed=1), sample(a, 16, seed=2)]
    tokens = sum(float(s.loss_mask.sum()) for s in samples)
    compact = gradients(hf, [packed(a, samples, 4)], layout, AUX | Z, tokens)
    for batch in (packed(a, samples, 4, tail=24), padded(a, samples, 32)):
        for rank, without in zip(
            gradients(hf, [batch], layout, AUX | Z, tokens), compact, strict=True
        ):
            for name, gradient in rank.items():
                difference = (gradient - without[name]).abs().max() / without[name].abs().max()
                assert difference <= TOLERANCE, name
