"""Qwen3-VL on a ``HybridModel`` equals Hugging Face: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.engine import References
from tests.model.hybrid.hybrid_model import HybridQwen3VL
from tests.model.test_against_hf import UNIFORM_2, cases, compare, even, left, tail

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
SLOW = (
    *("packed", "PP 2, cut between attention and MLP", "PP 2, MoE, recomputed"),
    "MoE and dense layers",
)


@pytest.mark.parametrize(("layout", "batches", "model", "overrides"), cases(CASES, SLOW))
def test_it_equals_hugging_face(
    reference: References, layout: str, batches: Any, model: dict[str, Any], overrides: Any
) -> None:
    compare(reference, layout, batches, model, overrides, HybridQwen3VL)
