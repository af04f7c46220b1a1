"""Greedy answers equal Hugging Face's ``generate``, token for token."""

from __future__ import annotations

import pytest

from mcore_qwen3vl.layout import Layout
from tests.generation.cases import KINDS, LAYOUTS, answer, conversations, expected
from tests.turns import slow_except

# Our float32 logits and HF's differ by about 1e-5; a token that led by less would be chance.
CLEAR_MARGIN = 1e-3


@pytest.mark.parametrize(
    ("model", "layout"),
    slow_except(
        [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts],
        ("dense", "tp2+sp"),
        ("qwen3.5-moe", "single"),
    ),
)
def test_greedy_answers_equal_hugging_face(model: str, layout: str) -> None:
    wants = [expected(model, kind) for kind in KINDS]
    assert min(want.margin for want in wants) > CLEAR_MARGIN
    ranks = answer(model, [conversations(kind) for kind in KINDS], Layout.parse(layout))
    for batches in ranks:
        for kind, want, answers in zip(KINDS, wants, batches, strict=True):
            assert [a.token_ids for a in answers] == want.tokens, kind
