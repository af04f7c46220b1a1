"""The records of a micro-batch exchange their answers, packed or one a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import PER_PATCH
from tests.training.preference.pairs import write_labelled


def loader(checkpoint: Path, data: Path, **settings: Any) -> Loader:
    return Loader(
        [Source(data)],
        Architecture.from_hf(checkpoint),
        load_processor(checkpoint),
        DataConfig(labelled=True, **settings),
        num_workers=0,
    )


def parts_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each sequence before its first trained one, and from there on."""
    if batch.cu_seqlens is None:
        places = [(row, 0) for row in range(len(batch.input_ids))]
    else:
        places = [(0, start) for start in batch.cu_seqlens.tolist()]
    found = []
    for (row, start), length in zip(places, batch.lengths, strict=False):
        tokens = batch.input_ids[row, start : start + length].tolist()
        weights = batch.loss_weights[row, start : start + length]
        answer = int((weights > 0).nonzero()[0]) + 1  # the weight is that of the next token
        found.append((tokens[:answer], tokens[answer:]))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_length": 512, "packing": True},
        {"seq_length": 512, "packing": True, "length_multiple": 8},
        {"seq_length": 256, "micro_batch_size": 3},
    ],
)
def test_each_prompt_gets_the_answer_of_the_record_before(
    settings: dict[str, Any], dense: Path, tmp_path: Path
) -> None:
    data = write_labelled(tmp_path, 16)
    labels = [json.loads(line)["label"] for line in data.read_text().splitlines()]
    batches = loader(dense, data, **settings)
    several = 0
    for _ in range(5):
        batch = next(batches)
        assert batch.task.desirable.tolist() == [
            labels[int(n.rsplit(":")[-1]) - 1] for n in batch.names
        ]
        own, other = parts_of(batch), batch.with_exchanged_answers()
        answers = [answer for _, answer in own]
        expected = zip([prompt for prompt, _ in own], answers[-1:] + answers[:-1], strict=True)
        assert parts_of(other) == list(expected)
        several += len(own) > 1
        if batch.visual is not None:
            assert other.visual is not None
            assert torch.equal(batch.visual.grid_thw, other.visual.grid_thw)
            for name in PER_PATCH:
                assert getattr(other.visual, name) is getattr(batch.visual, name)
    assert several > 2


def test_an_exchanged_answer_that_does_not_fit_a_row_is_cut(dense: Path, tmp_path: Path) -> None:
    texts = [("a" * 60, "b" * 10), ("a", "b" * 70)]
    records = [{"prompt": p, "completion": c, "label": True} for p, c in texts]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, records)) + "\n")
    settings = {"micro_batch_size": 2, "shuffle": False}
    whole = next(loader(dense, data, seq_length=512, **settings))
    length = max(whole.lengths)
    assert max(whole.with_exchanged_answers().lengths) > length
    batch = next(loader(dense, data, seq_length=length, **settings))
    assert max(batch.with_exchanged_answers().lengths) == length


def test_other_records_are_bad(dense: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    data.write_text(4 * (json.dumps({"messages": turns}) + "\n"))
    with pytest.raises(BadInput, match="not a labelled record: --loss kto needs a label"):
        next(loader(dense, data, seq_length=64, micro_batch_size=2))
