"""Reward training equals one process on the whole batch, in every layout; rewards are HF's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoProcessor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.verification.curves import Job, train
from tests.losses.pairs import sides_of, write_pairs
from tests.losses.whole_batch import (
    LAYOUTS,
    PACKED,
    class_of,
    first_records,
    headed_adapter,
    headed_model,
    inputs_of,
    loaded,
    scored,
    trained_adapter,
    trained_twice,
)
from tests.training.one_step import TOLERANCE, Plain, check_step, step_job
from tests.turns import slow, slow_except

TASK = ("--task", "reward")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return preference records, two thirds of which have a margin.

    In the others, both sides have images of their own. Where they share an image, its gradient is a
    small difference of large numbers.
    """
    file = write_pairs(tmp_path_factory.mktemp("pairs"), 16)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    rejected = [record["rejected"] for record in records[::3]]
    for number, record in enumerate(records):
        record |= {"margin": number / 4} if number % 3 else {"rejected": rejected[number // 3 - 1]}
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def reward(model: Any, processor: Any, side: list[dict[str, Any]], folder: Path) -> Tensor:
    return model(**inputs_of(processor, side, folder, prompt=False)).logits[0, 0]


def plain_step(job: Job) -> Plain:
    """Compute TRL's loss, one pair at a time."""
    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, named = headed_model(job, num_labels=1)
    losses = []
    for record in first_records(job, lambda record: 2):
        chosen, rejected = (
            reward(model, processor, side, job.data.parent) for side in sides_of(record)
        )
        gap = chosen - rejected - record.get("margin", 0.0)
        losses.append(-torch.nn.functional.logsigmoid(gap))
    return Plain.of(torch.stack(losses).mean(), named)


@pytest.mark.parametrize(
    ("kind", "layout", "flags"),
    [*slow_except(LAYOUTS, ("dense", "tp2+sp", PACKED)), *slow(("hybrid", "cp2", PACKED))],
)
def test_loss_and_every_gradient_are_those_of_one_process(
    kind: str,
    layout: str,
    flags: tuple[str, ...],
    headed: Callable[..., Path],
    pairs: Path,
    tmp_path: Path,
) -> None:
    job = step_job(headed(kind, num_labels=1), pairs, layout, *TASK, *flags)
    check_step(job, plain_step(job), "reward loss", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("dense", "cp2"), ("moe", "ep2xdp2")])
def test_an_adapter_trains_with_its_head_and_scores(
    checkpoint: Path, layout: str, pairs: Path, tmp_path: Path
) -> None:
    """The base is a language model; PEFT's own model is the reference."""
    adapter = headed_adapter(tmp_path / "adapter", checkpoint, 1)
    job = step_job(checkpoint, pairs, layout, *TASK, *PACKED, lora=adapter)
    exported = trained_adapter(job, plain_step(job), "reward loss", tmp_path)
    base = class_of(checkpoint).from_pretrained(checkpoint, dtype=torch.float32, num_labels=1)
    model = PeftModel.from_pretrained(base, exported)
    expected = rewards_of(model, checkpoint, pairs)
    compare_scores(checkpoint, "tp2+sp", pairs, tmp_path / "out.jsonl", expected, lora=exported)


def test_flags_alone_make_an_adapter_with_a_head(dense: Path) -> None:
    job = step_job(dense, Path("x.jsonl"), "single", *TASK, "--lora-rank", "4")
    settings = validate(job.argv, 1).settings
    config = settings.lora.adapter_config(Architecture.from_hf(dense), settings.loss.scored_by)
    assert config.modules_to_save == ("score",)
    assert config.to_dict()["task_type"] == "SEQ_CLS"


@pytest.mark.slow
def test_a_new_head_is_the_same_under_every_layout(
    dense: Path, pairs: Path, tmp_path: Path
) -> None:
    (first,), (other,) = (
        train(step_job(dense, pairs, layout, *TASK, *PACKED), tmp_path / layout)
        for layout in ("pp2", "tp2+sp")
    )
    assert other["reward loss"] == pytest.approx(first["reward loss"], rel=TOLERANCE)


@pytest.mark.slow
def test_a_language_model_gets_a_head_that_is_exported_scored_and_resumed(
    dense: Path, pairs: Path, tmp_path: Path
) -> None:
    """Transformers' own class loads the export. A classifier has the fast test of this."""
    job = step_job(dense, pairs, "pp2", *TASK, *PACKED)
    save, exported = trained_twice(job, "reward loss", tmp_path)
    model = loaded(exported)
    assert model.config.num_labels == 1
    expected = rewards_of(model, exported, pairs)
    for checkpoint, layout in ((exported, "dp2"), (save, "tp2xcp2+sp")):
        compare_scores(checkpoint, layout, pairs, tmp_path / f"{layout}.jsonl", expected)


def rewards_of(model: Any, checkpoint: Path, pairs: Path) -> list[list[float]]:
    """Return both rewards of each pair, with the processor of `checkpoint`."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    with torch.no_grad():
        return [
            [float(reward(model, processor, side, pairs.parent)) for side in sides_of(record)]
            for record in records
        ]


def compare_scores(
    checkpoint: Path,
    layout: str,
    pairs: Path,
    out: Path,
    expected: list[list[float]],
    lora: Path | None = None,
) -> None:
    """Compare what `score` writes with `expected`."""
    found = scored(checkpoint, pairs, out, layout, "reward", lora=lora)
    assert (found.rewards, found.pairs) == (32, 16)
    assert found.chosen_preferred == sum(a > b for a, b in expected) / 16
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    rewards = [[entry[side]["reward"] for side in ("chosen", "rejected")] for entry in entries]
    assert rewards == [pytest.approx(row, abs=TOLERANCE) for row in expected]


def test_what_cannot_begin_is_refused(dense: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"lacks the tensor score\.weight"):
        score(ScoreRequest(dense, pairs, tmp_path / "out.jsonl", task="reward"), on_cpu=True)
