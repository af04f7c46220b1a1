"""Greedy answers under the ``te`` spec equal Hugging Face's, token for token."""

from __future__ import annotations

from functools import partial

import pytest

from tests.model.te.installed import require

require()

from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.model.build import build_chunks  # noqa: E402
from tests.generation import cases  # noqa: E402

pytestmark = pytest.mark.slow
LAYOUTS = {False: ("single", "tp2+sp", "pp2"), True: ("single", "tp2", "ep2xdp2")}
ROWS = [(moe, layout) for moe, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize(("moe", "layout"), ROWS)
def test_answers_as_hugging_face(moe: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = {"moe_permute_fusion": True} if moe else {}
    monkeypatch.setattr(cases, "build_chunks", partial(build_chunks, spec="te", **fused))
    kinds = ("video", "batch")
    expected = [cases.expected(moe, kind).tokens for kind in kinds]
    for rank in cases.answer(moe, [cases.conversations(k) for k in kinds], Layout.parse(layout)):
        assert [[g.token_ids for g in generations] for generations in rank] == expected
