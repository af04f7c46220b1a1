"""The log's loss of each data set of a mixture is that of plain Hugging Face on its samples."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verify.curves import TOLERANCE, Job, batch_names, encode, train

NAMES = {"first/train.jsonl": "first/train.jsonl", "second/train.jsonl": "sums"}
"""The name in the log of each data set: by default its path."""

TWO_ROWS = ("--micro-batch-size", "2", "--global-batch-size", "8")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data set of images and one of sums, which have other lengths and other losses."""
    folder = tmp_path_factory.mktemp("mixture")
    write_image_qa(folder / "first", 12, text_only_every=None)
    write_image_qa(folder / "second", 12, text_only_every=1, seed=1)
    file = folder / "mixture.yaml"
    file.write_text(
        "datasets:\n  - {path: first/train.jsonl}\n  - {path: second/train.jsonl, name: sums}\n"
    )
    return file


class Plain:
    """Losses of single samples by plain Hugging Face, without training."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._folder = folder
        self.of = cache(self._of)

    @torch.no_grad()
    def _of(self, name: str) -> tuple[str, float, int]:
        """Return the data set of a sample, the sum of its losses, and its trained tokens."""
        file, line = name.rsplit(":", 1)
        path = next(self._folder / path for path in NAMES if file.endswith(path))
        record = json.loads(path.read_text().splitlines()[int(line) - 1])
        inputs, labels = encode(self._processor, record["messages"], path.parent)
        logits = self._model(**inputs).logits[0, :-1]
        loss = F.cross_entropy(logits, labels[1:], reduction="sum").item()
        return str(path.relative_to(self._folder)), loss, int((labels != -100).sum())

    def means(self, steps: list[list[str]]) -> dict[str, float]:
        """Return the mean loss of each data set over the samples of some steps."""
        total, tokens = Counter[str](), Counter[str]()
        for name in (name for step in steps for name in step):
            data_set, loss, count = self.of(name)
            total[NAMES[data_set]] += loss  # type: ignore[assignment]
            tokens[NAMES[data_set]] += count
        return {f"lm loss {name}": total[name] / tokens[name] for name in total}


def of_data_sets(entry: dict[str, Any], prefix: str = "") -> dict[str, float]:
    begin = f"{prefix}lm loss "
    return {name.removeprefix(prefix): x for name, x in entry.items() if name.startswith(begin)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("cp2", ("--packing",)),
        ("single", TWO_ROWS),
        ("dp2", ("--packing", "--no-balance")),
        ("tp2+sp", ("--packing",)),
        ("pp2xvpp2", ("--packing",)),
        ("cp2xdp2", ()),
    ],
)
def test_each_data_sets_loss_is_that_of_plain_hugging_face(
    layout: str, flags: tuple[str, ...], dense: Path, mixture: Path, tmp_path: Path
) -> None:
    """Over all micro-batches of all steps since the last entry, in training and validation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    still = ("--lr", "0", "--weight-decay", "0", "--log-interval", "2")
    valid = ("--valid-data-path", str(mixture), "--eval-iters", "2", "--eval-interval", "4")
    logs = ("--tensorboard-dir", str(tmp_path / "events"))
    job = Job(
        dense, mixture, Layout.parse(layout), steps=4, batch=2, seq_length=256,
        flags=(*still, *flags),
    )  # fmt: skip
    train(job, tmp_path, *valid, *logs, timeout=300)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    found = {entry["iteration"]: of_data_sets(entry) for entry in log if "lm loss" in entry}
    (validation, *_) = (entry for entry in log if "validation lm loss" in entry)
    plain = Plain(dense, mixture.parent)
    order = [list(chain.from_iterable(step)) for step in batch_names(job, mixture, 4)]
    for end in (2, 4):
        assert found[end] == pytest.approx(plain.means(order[end - 2 : end]), rel=TOLERANCE)
    assert len(found[2] | found[4]) == 2  # two steps of few samples may draw from one data set
    validated = batch_names(job, mixture, 2, split="val")
    expected = plain.means([list(chain.from_iterable(step)) for step in validated])
    assert of_data_sets(validation, "validation ") == pytest.approx(expected, rel=TOLERANCE)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name, value in found[4].items():
        assert events.Scalars(f"qwen3-vl/{name}")[-1].value == pytest.approx(value, rel=1e-6)
        assert events.Scalars(f"{name} validation")[0].step == 4
