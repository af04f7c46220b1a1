"""A reference's file is read pair by pair, and refused if it is not of these data and tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Source, load_processor
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.preference import PreferenceLoss
from mcore_qwen3vl.losses.reference_file import ReferenceFile, References
from mcore_qwen3vl.rehearsal.command import write_made_up_sidecar
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.arguments.command_line import CommandLine


def plans_of(dense: Path, data: Path) -> list[list[Any]]:
    preparation = Preparation(load_processor(dense), DataConfig(512), [Source(data)])
    form = PreferenceLoss.records
    return [
        [*preparation.plan_each(preparation.raw(crude), form).values()]
        for crude in CrudeSamples([Source(data)], split="train", trust=False)
    ]


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
    (plans,) = plans_of(dense, data)
    scored = tuple(entry[side]["log_prob"] for side in ("chosen", "rejected"))
    assert found.look_up(0, plans) == scored
    with pytest.raises(BadInput, match=r"pairs\.jsonl:1 no longer has the tokens"):
        found.require(0, plans[::-1])
    data.write_text(data.read_text() + "\n")
    with pytest.raises(BadInput, match="was not made from the current content"):
        opened(data)


def test_one_that_is_made_up_is_read_with_made_up_pairs(dense: Path, tmp_path: Path) -> None:
    data = write_half_images(
        tmp_path / "data", 3, tokens=200, image_side=4, token_pixels=8, pairs=True
    )
    flags = ["--hf-model", str(dense), "--loss", "dpo", "--seq-length", "512"]
    write_made_up_sidecar(ReferenceFile(), data, dense, CommandLine(flags).settings)
    found, size = opened(data), Architecture.from_hf(dense).vocab_size
    for number, plans in enumerate(plans_of(dense, data)):
        of_tokens = [-math.log(size) * plan.trained_tokens for plan in plans]
        assert found.look_up(number, plans) == tuple(of_tokens)
