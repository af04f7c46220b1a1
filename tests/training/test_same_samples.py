"""Steps and validations see the same records under every layout and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.curves import (
    Job,
    encode_conversation,
    import_for_ranks,
    run_rank,
    train,
)
from tests.training.log import entries_of, validation_losses

COLOURS = ("red", "orange", "yellow", "green", "blue", "indigo", "violet")
RECORDS, HELD_OUT, BATCH = 10, 7, 4


@pytest.fixture
def colours(tmp_path: Path) -> Callable[[str, int], Path]:
    def write(name: str, count: int) -> Path:
        path = tmp_path / name
        lines = []
        for i in range(count):
            answer = f"{COLOURS[i % 7]} {i} " * (1 + i % 3)
            turns = (("user", f"Say colour {i}."), ("assistant", answer))
            lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def job(dense: Path, colours: Callable[[str, int], Path]) -> Job:
    held_out = colours("held-out.jsonl", HELD_OUT)
    flags = ("--valid-data-path", str(held_out), "--eval-interval", "2", "--lr", "1e-12")
    return Job(
        dense, colours("train.jsonl", RECORDS), steps=5, batch=BATCH, seq_length=128, flags=flags
    )


def by_step(found: list[Any], per_step: int) -> list[list[int]]:
    """Return the records of each step, sorted, where each rank has `per_step` micro-batches."""
    ranks: dict[str, list[list[int]]] = {}
    for rank, names in found:
        ranks.setdefault(rank, []).append(names)
    steps = []
    for start in range(0, len(next(iter(ranks.values()))), per_step):
        of_ranks = [own[start : start + per_step] for own in ranks.values()]
        steps.append(sorted({line for own in of_ranks for names in own for line in names}))
    return steps


def hf_mean(checkpoint: Path, data: Path) -> float:
    """Return the mean loss of the trained tokens of a data set, by Hugging Face alone."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        inputs, labels = encode_conversation(processor, json.loads(line)["messages"], data.parent)
        with torch.no_grad():
            logits = model(**inputs).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
        count += int((labels[1:] >= 0).sum())
    return total / count


@pytest.mark.slow
def test_validations_and_steps_are_those_of_one_rank(
    job: Job, seen: Callable[[], dict[str, list[Any]]], tmp_path: Path
) -> None:
    """The last batch of a validation is not full, and of two ranks the second has none of it."""
    expected = hf_mean(job.checkpoint, tmp_path / "held-out.jsonl")
    everything = [[1, 2, 3, 4], [5, 6, 7]]
    train(job, tmp_path / "single")
    single = seen()
    steps = by_step(single["train"], BATCH)
    assert Counter(line for _, names in single["train"] for line in names) == dict.fromkeys(
        range(1, RECORDS + 1), 2
    )
    assert by_step(single["valid"], BATCH) == everything * 3
    assert validation_losses(tmp_path / "single") == pytest.approx([expected] * 3, rel=1e-5)

    save = ("--save", str(tmp_path / "save"), "--save-interval", "2")
    train(job, tmp_path / "half", *save, "--exit-interval", "2")
    assert by_step(seen()["train"], BATCH) == steps[:2]
    two = replace(job, layout=Layout(dp=2), flags=(*job.flags, *save))
    train(two, tmp_path / "rest")
    rest = seen()
    assert by_step(rest["train"], BATCH // 2) == steps[2:]
    assert by_step(rest["valid"], BATCH // 2) == everything * 2
    assert validation_losses(tmp_path / "rest") == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2", "pp2 packed"])
def test_other_layouts_see_the_same(
    layout: str, job: Job, seen: Callable[[], dict[str, list[Any]]], tmp_path: Path
) -> None:
    train(job, tmp_path / "single")
    single = seen()
    name, _, packed = layout.partition(" ")
    other = replace(job, layout=Layout.parse(name), packing=bool(packed), steps=4)
    train(other, tmp_path / "other")
    found = seen()
    if not packed:
        assert by_step(found["train"], BATCH) == by_step(single["train"], BATCH)[:4]
    # Megatron validates again at the end, here after the step of the last interval.
    assert by_step(found["valid"], BATCH) == [[1, 2, 3, 4], [5, 6, 7]] * 3
    losses = validation_losses(tmp_path / "other")
    assert losses == pytest.approx(validation_losses(tmp_path / "single")[:2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_number_of_epochs_is_the_length_of_the_run_and_of_its_schedule(
    packing: bool, job: Job, seen: Callable[[], dict[str, list[Any]]], tmp_path: Path
) -> None:
    job = replace(job, packing=packing, layout=Layout(dp=2), batch=2)
    at = job.argv.index("--train-iters")
    argv = [*job.argv[:at], *job.argv[at + 2 :], "--num-epochs", "3"]
    argv += ["--log-json", str(tmp_path / "log.jsonl"), "--eval-iters", "0", "--lr", "1e-3"]
    argv += ["--lr-decay-style", "linear", "--min-lr", "0"]
    import_for_ranks()
    run_layout(run_rank, 2, argv, tmp_path / "output.txt", timeout=600)
    counts = Counter(line for _, names in seen()["train"] for line in names)
    assert counts == dict.fromkeys(range(1, RECORDS + 1), 3)
    rates = [entry["learning rate"] for entry in entries_of(tmp_path)]
    assert rates[0] > 0.8e-3
    assert rates[-1] < rates[0] / len(rates) * 1.5
