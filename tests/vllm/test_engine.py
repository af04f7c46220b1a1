"""vLLM serves our exports: it scores and answers any kind of prompt as we do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from mcore_qwen3vl.layout import Layout
from tests.vllm.conftest import Made, Prompt
from tests.vllm.ours import TOLERANCE, answered, differences, scored, tokens


@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "tp2+sp"), ("tied", "pp2"), ("moe", "tp2xep2+sp")]
)
def test_it_scores_and_answers_as_we_do(
    kind: str,
    layout: str,
    models: Callable[[str], Made],
    prompts: dict[str, Prompt],
    in_vllm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model, sizes = models(kind), Layout.parse(layout)
    found = in_vllm(model.exported, {"": None})[""]
    assert {name: one["prompt"] for name, one in found.items()} == tokens(model.exported, prompts)
    ours = scored(model.mcore, prompts, tmp_path, layout=sizes)
    off = differences(found, ours)
    print(kind, layout, {n: f"{d.absolute:.1e} of {d.scale:.0f}" for n, d in off.items()})
    assert max(one.relative for one in off.values()) < TOLERANCE, off
    answers = {name: one["answer"] for name, one in found.items()}
    own = answered(model.mcore, prompts, layout=sizes)
    assert answers == {name: one.token_ids for name, one in own.items()}
