"""Cases of the tasks' tests, and the records of their first step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Qwen3_5ForSequenceClassification

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.scoring.records import Tally
from mcore_qwen3vl.scoring.score import ScoreRequest, ScoreTask, score
from mcore_qwen3vl.verification.curves import Job, sample_order, train, with_image_paths
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verification.parity.reference import trained_parameters
from tests.converters.forms import (
    Qwen3VLForSequenceClassification,
    Qwen3VLMoeForSequenceClassification,
)
from tests.training.one_step import Plain, check_step

PACKED = ("--packing",)
LAYOUTS = [
    ("dense", "dp2", PACKED),
    ("dense", "tp2+sp", PACKED),
    ("dense", "cp2", PACKED),
    ("tied", "pp2", PACKED),
    ("moe", "ep2xdp2", PACKED),
    ("dense", "single", PACKED),
    ("dense", "tp2", PACKED),
    ("dense", "tp2xcp2+sp", PACKED),
    ("dense", "dp2", ()),
    ("dense", "pp2xvpp2", ()),
    ("moe", "tp2xetp2+sp", PACKED),
]
"""Cases of a test: the checkpoint, the layout and flags. All tasks have their step in common. So
each has two fast rows: CP, which puts the text's last token on a rank, and another kind of
parallelism, so that together the fast rows have every kind."""


def first_records(job: Job, sequences: Callable[[Any], int]) -> list[Any]:
    """Return the records of the first step's global batch.

    Args:
        job: the run.
        sequences: the number of sequences that a record has; each of them names its line.
    """
    lines = job.data.read_text().splitlines()
    found = []
    for line, count in Counter(sample_order(job)[0]).items():
        record = json.loads(lines[line])
        found += [record] * (count // sequences(record))  # a small data set repeats in one batch
    return found


def inputs_of(
    processor: Any, messages: list[dict[str, Any]], folder: Path, *, prompt: bool = True
) -> Any:
    """Return the model's inputs for a conversation."""
    return processor.apply_chat_template(
        with_image_paths(messages, folder),
        add_generation_prompt=prompt,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def class_of(checkpoint: Path) -> Any:
    """Return transformers' class of a sequence classifier."""
    a = Architecture.from_hf(checkpoint)
    if a.delta_net is not None:
        return Qwen3_5ForSequenceClassification
    return Qwen3VLMoeForSequenceClassification if a.is_moe else Qwen3VLForSequenceClassification


def headed_adapter(folder: Path, checkpoint: Path, labels: int) -> Path:
    """Write an adapter of a classifier to `folder`, with a head of its own, and return `folder`."""
    is_moe = Architecture.from_hf(checkpoint).is_moe
    config = replace(
        ADAPTERS["experts" if is_moe else "language"],
        modules_to_save=("score",),
        raw={"task_type": "SEQ_CLS"},
    )
    problem: Any = "single_label_classification" if labels > 1 else None
    with_labels = Labels.numbered(labels, problem).in_config(read_config_file(checkpoint))
    return write_random_adapter(folder, config, with_labels)


def headed_model(job: Job, **config: Any) -> tuple[Any, dict[str, Any]]:
    """Return transformers' classifier, with the job's adapter, and what trains by its name."""
    model = class_of(job.checkpoint).from_pretrained(job.checkpoint, dtype=torch.float32, **config)
    if job.lora is None:
        return model, dict(model.named_parameters())
    whole = PeftModel.from_pretrained(model, job.lora, is_trainable=True)
    return whole, trained_parameters(whole)


def scored(
    checkpoint: Path, data: Path, out: Path, layout: str, task: ScoreTask, **options: Any
) -> Tally:
    """Run `score` in float32, and return what it has counted."""
    options |= {"layout": Layout.parse(layout), "dtype": "fp32", "seq_length": 512, "buffer": 5}
    found = score(ScoreRequest(checkpoint, data, out, task=task, **options), on_cpu=True)
    assert found is not None
    return found


def trained_adapter(job: Job, plain: Plain, loss: str, folder: Path) -> Path:
    """Check a job's first step, train its adapter, and return the export."""
    flags = (*job.flags, "--save-hf", str(folder / "export"))
    check_step(replace(job, flags=flags), plain, loss, folder)
    return folder / "export/iter_0000001"


def trained_twice(job: Job, loss: str, folder: Path) -> tuple[Path, Path]:
    """Train one step, go on for another, and return the checkpoints and the last export."""
    save, export = folder / "save", folder / "export"
    flags = ("--save", str(save), "--save-hf", str(export), "--save-interval", "1")
    (first,) = train(job, folder / "run", *flags)
    more = (*flags, "--override-opt-param-scheduler")
    (second,) = train(replace(job, steps=2), folder / "rest", *more)
    assert second[loss] != first[loss]
    return save, export / "iter_0000002"


def loaded(exported: Path) -> Any:
    """Return transformers' own class with the weights of an export, which has all of them."""
    model, info = class_of(exported).from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    return model
