"""A few steps of ``mcore_qwen3vl.verification.curves`` show Hugging Face's training curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.curves import (
    TOLERANCE,
    curve_of,
    hf_curve,
    table_jobs,
    train,
    with_image_paths,
    worst_difference,
)
from tests.turns import slow

STEPS = 3
ROWS = [
    pytest.param(False, "single, packed", marks=pytest.mark.slow),  # cp2 divides the same packs
    pytest.param(False, "pp2xvpp2", marks=pytest.mark.slow),  # parity has its gradients
    pytest.param(False, "cp2, packed", marks=pytest.mark.slow),  # its weights are below
    pytest.param(False, "dp2", marks=pytest.mark.slow),  # ep2xdp2 has its optimizer and losses
    pytest.param(True, "tp2+sp", marks=pytest.mark.slow),  # parity has its gradients
    (True, "ep2xdp2"),
]


@pytest.mark.parametrize(("is_moe", "name"), ROWS)
def test_loss_and_gradient_norm_are_those_of_a_plain_hf_loop(
    is_moe: bool, name: str, dense: Path, moe: Path, data: Path, tmp_path: Path
) -> None:
    checkpoint = moe if is_moe else dense
    job = replace(table_jobs(is_moe)[name], checkpoint=checkpoint, data=data, steps=STEPS)
    ours, theirs = curve_of(train(job, tmp_path, timeout=120)), hf_curve(job)
    assert theirs[-1].loss < theirs[0].loss - 0.5  # the model does learn
    difference = worst_difference(ours, theirs)
    assert difference.loss <= TOLERANCE
    assert difference.grad_norm <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "cp2, packed",
        *slow("pp2xvpp2"),  # it divides no sample and no batch
        *slow("dp2"),
    ],
)
def test_weights_are_normalised_over_the_global_batch(
    name: str, dense: Path, tmp_path: Path
) -> None:
    data = write_image_qa(tmp_path / "data", 16)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    weighted = [{**r, "weight": (0.03, 1.5, 0.4)[i % 3]} for i, r in enumerate(records)]
    data.write_text("".join(json.dumps(record) + "\n" for record in weighted))
    job = replace(table_jobs(False)[name], checkpoint=dense, data=data, steps=2)
    job = replace(job, flags=(*job.flags, "--loss", "weighted_cross_entropy"))
    difference = worst_difference(curve_of(train(job, tmp_path, timeout=120)), hf_curve(job))
    assert difference.loss <= TOLERANCE
    assert difference.grad_norm <= TOLERANCE


def test_only_images_are_given_a_path() -> None:
    """A writer of tables gives every part of a record the fields of all of them."""
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?", "image": None}]
    (turn,) = with_image_paths([{"role": "user", "content": parts}], Path("/data"))
    assert turn["content"] == [{"type": "image", "image": "/data/a.png"}, parts[1]]
