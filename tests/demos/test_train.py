"""HF's own generate answers eight image questions from a model trained on them and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.demos.train import answer
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verify.job import Job, train


@pytest.mark.slow  # `make train-demo` shows the same
@pytest.mark.parametrize("layout", ["tp2+sp"])
def test_the_exported_model_answers_what_was_learnt(
    layout: str, dense: Path, tmp_path: Path
) -> None:
    data = write_image_qa(tmp_path / "data", 8, text_only_every=None)
    job = Job(dense, data, Layout.parse(layout), steps=70, batch=1, seq_length=512, packing=True)
    log = train(
        job, tmp_path / "run", "--save-hf", str(tmp_path / "hf"), "--lr", "5e-3",
        "--packing-buffer", "8", "--weight-decay", "0", timeout=300,
    )  # fmt: skip
    assert log[-1]["lm loss"] < 0.02
    records = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    with torch.no_grad():
        answers = answer(tmp_path / "hf" / "iter_0000070", records, data.parent)
    assert answers == [messages[-1]["content"] for messages in records]
