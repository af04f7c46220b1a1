"""A reference's file is read pair by pair, and refused if it is not of these data and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_qwen3vl.data import DataConfig, Source, load_processor
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.preference import PreferenceLoss
from mcore_qwen3vl.losses.reference_file import ReferenceFile, References
from mcore_qwen3vl.scoring.score import ScoreRequest, score


def opened(data: Path) -> References:
    (references,) = ReferenceFile().open([data], None, 0)
    return references


def test_references_are_those_of_the_scored_answers(dense: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    shared = [{"role": "user", "content": "Which?"}]
    data.write_text(json.dumps({"messages": shared, "chosen": "This.", "rejected": "That!"}) + "\n")
    with pytest.raises(BadInput, match="Let the model score"):
        opened(data)
    score(ScoreRequest(dense, data, temperature=0.7), on_cpu=True)
    with pytest.raises(BadInput, match=r"temperature 0\.7, and 1 is needed"):
        opened(data)
    score(ScoreRequest(dense, data, force=True), on_cpu=True)
    entry = json.loads((tmp_path / "pairs.scores.jsonl").read_text())
    found = opened(data)
    preparation = Preparation(load_processor(dense), DataConfig(512), [Source(data)])
    (crude,) = CrudeSamples([Source(data)], split="train", trust=False)
    plans = [*preparation.plan_each(preparation.raw(crude), PreferenceLoss.records).values()]
    scored = tuple(entry[side]["log_prob"] for side in ("chosen", "rejected"))
    assert found.look_up(0, plans) == scored
    with pytest.raises(BadInput, match=r"pairs\.jsonl:1 no longer has the tokens"):
        found.require(0, plans[::-1])
    data.write_text(data.read_text() + "\n")
    with pytest.raises(BadInput, match="was not made from the current content"):
        opened(data)
