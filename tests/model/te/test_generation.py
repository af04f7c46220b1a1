"""Greedy answers under the ``te`` spec equal Hugging Face's, token for token."""

from __future__ import annotations

from functools import partial

import pytest

from tests.model.te.installed import require

require()

from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.model.qwen3vl import build_chunks  # noqa: E402
from tests.generation import cases  # noqa: E402

pytestmark = pytest.mark.slow
LAYOUTS = {
    "dense": ("single", "tp2+sp", "pp2"),
    "yarn": ("single",),
    "moe": ("single", "tp2", "ep2xdp2"),
}
ROWS = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_answers_as_hugging_face(model: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = {"moe_permute_fusion": True} if model == "moe" else {}
    monkeypatch.setattr(cases, "build_chunks", partial(build_chunks, spec="te", **fused))
    kinds = ("video", "batch")
    expected = [cases.expected(model, kind).tokens for kind in kinds]
    for rank in cases.answer(model, [cases.conversations(k) for k in kinds], Layout.parse(layout)):
        assert [[g.token_ids for g in generations] for generations in rank] == expected
