"""Logits, loss and all gradients equal Hugging Face's, by a check that shares no code with ours.

``verify/parity`` compares every layout and batch. These tests check its own tools: weights are
cut by hand-written rules instead of the conversion table, and positions, labels and loss masks are
random, so that nothing holds by chance. Each gradient rule of the design has a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import Freezing
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
    """Make packs whose samples are padded as CP requires and whose tail is padding."""
    made = samples(reference, 29, 13, 24, 29)
    a = reference.architecture
    return made, [[packed(a, made[:3], 8, tail=16), packed(a, made[3:], 8, tail=56)]]


def ragged(reference: Reference, dp: int) -> Batches:
    """Make micro-batches of different lengths."""
    made = samples(reference, 28, 28, 40, 40, 32, 32, 36, 36)
    pairs = [made[i : i + 2] for i in (0, 2, 4, 6)]
    return made, [[padded(reference.architecture, p, p[0].input_ids.shape[1]) for p in pairs]]


def text_beside_images(reference: Reference, dp: int) -> Batches:
    """Give one rank samples with images or a video, and the other text alone."""
    a = reference.architecture
    ranks = [
        [sample(a, 32, IMAGES, seed=1), sample(a, 32, VIDEO, seed=2)],
        [sample(a, 32, seed=3), sample(a, 32, seed=4)],
    ]
    return [s for rank in ranks for s in rank], [[padded(a, [s], 32) for s in r] for r in ranks]


UNIFORM_2 = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2
}  # fmt: skip
MLP = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@dataclass(frozen=True)
class Given:
    """A case without its reference; see :class:`tests.model.engine.Case`."""

    layout: str
    batches: Callable[[Reference, int], Batches] = even
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()


CASES = {
    "features land on their tokens with two samples a micro-batch": Given("single"),
    "each SP rank adds its DeepStack rows once": Given("tp2+sp"),
    "features gathered over CP, padding at a pack's tail": Given("cp2", tail),
    "recompute of two layers keeps DeepStack": Given("tp2xcp2+sp", left, overrides=UNIFORM_2),
    "interleaved pipeline, tied": Given("pp2xvpp2", model={"tie": True}),
    "features travel with uneven micro-batches": Given(
        "pp4", ragged, overrides={"variable_seq_lengths": True}
    ),
    "a rank without images reduces with the others": Given(
        "tp2xdp2+sp", text_beside_images, ddp={"overlap_grad_reduce": True, "bucket_size": 4000}
    ),
    "padding is routed to no expert": Given("tp2xep2+sp", tail, {"moe": True}),
    "dense and MoE layers in turn": Given(
        "pp2", model={"moe": True, "text": {"mlp_only_layers": [0, 3]}}
    ),
    "eight ranks": Given("tp2xpp2xvpp2xep2xcp2+sp", model={"moe": True}),
    "frozen language, recomputed MLPs": Given("tp2+sp", overrides=MLP, frozen=("language",)),
    "all frozen but the last layer, recomputed": Given(
        "pp2xvpp2",
        overrides=UNIFORM_2,
        frozen=("vision", "aligner", "embedding", r"decoder\.layers\.[012]\."),
    ),
}


QUICK = (
    "features land on their tokens with two samples a micro-batch",
    "each SP rank adds its DeepStack rows once",
    "features gathered over CP, padding at a pack's tail",
    "interleaved pipeline, tied",
    "padding is routed to no expert",
)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_equals_hugging_face(reference: References, given: Given) -> None:
    hf, layout = reference(**given.model), Layout.parse(given.layout)
    made, batches = given.batches(hf, layout.dp)
    check(
        Case(
            layout,
            hf,
            batches,
            hf.expect(made),
            overrides=given.overrides,
            ddp=given.ddp,
            prepare=lambda model: Freezing(given.frozen).apply(model),
        )
    )


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
    [("single", AUX | Z), *slow(("tp2xep2+sp", AUX), ("cp2xep2", AUX))],
)
def test_padding_counts_in_no_loss_of_the_router(
    reference: References, layout: str, losses: dict[str, Any]
) -> None:
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
