"""Qwen3-VL on a ``HybridModel`` equals Hugging Face: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from tests.model.engine import Case, References, check
from tests.model.hybrid.hybrid_model import HybridQwen3VL
from tests.model.test_against_hf import UNIFORM_2, Batches, even, left, tail

CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "single": ("single", even, {}, {}),
    "packed": ("single", tail, {}, {}),
    "TP 2 with SP": ("tp2+sp", even, {}, {}),
    "PP 2, tied": ("pp2", even, {"tie": True}, {}),
    "PP 2, cut between attention and MLP": ("pp2", even, {}, {"layers": "*-*|-*-*-"}),
    "recompute of two layers at a time": ("tp2+sp", left, {}, UNIFORM_2),
    "PP 2, MoE, recomputed": ("pp2", even, {"moe": True}, UNIFORM_2),
    "MoE and dense layers": ("ep2xdp2", even, {"moe": True, "text": {"mlp_only_layers": [1]}}, {}),
}


FAST = ("single", "TP 2 with SP", "PP 2, tied", "recompute of two layers at a time")


@pytest.mark.parametrize(
    ("layout", "batches", "model", "overrides"),
    [
        pytest.param(*case, id=name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_it_equals_hugging_face(
    reference: References, layout: str, batches: Any, model: dict[str, Any], overrides: Any
) -> None:
    hf, sizes = reference(**model), Layout.parse(layout)
    made: Batches = batches(hf, sizes.dp)
    samples, of_ranks = made
    check(Case(sizes, hf, of_ranks, hf.expect(samples), overrides=overrides, kind=HybridQwen3VL))
