"""A made-up teacher's likeliest tokens, for distillation on made-up data."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.data.loader import load_processor
from mcore_qwen3vl.data.loading.datasets import CrudeSamples
from mcore_qwen3vl.data.loading.sources import parse_sources
from mcore_qwen3vl.data.scores import digest, facts_of, file_digest, teacher_of, vocabulary_of
from mcore_qwen3vl.data.teacher import encoded_top, write_teacher
from mcore_qwen3vl.objectives.settings import TEACHER_TOP_K as K
from mcore_qwen3vl.scoring.records import Records
from mcore_qwen3vl.training.distillation.flags import distillation_of


def write_made_up(data: Path, model: Path, args: argparse.Namespace) -> None:
    """Write the file of a teacher for whom K tokens and all others together are equally likely."""
    processor, architecture = load_processor(model), Architecture.from_hf(model)
    media = MediaLimits(**{f.name: getattr(args, f.name) for f in fields(MediaLimits)})
    sources = parse_sources([str(data)])
    samples = CrudeSamples(sources, split="train", trust=False)
    config = DataConfig(args.seq_length, media=media)
    records = Records(samples, sources, architecture, processor, config, 1)
    lines = []
    for micro in records.plan(range(len(samples))):
        plan = micro[0].plan
        count = int((plan.loss_weights[1:] > 0).sum())
        ids, log_probs = (
            np.tile(np.arange(K), (count, 1)),
            np.full((count, K + 1), -math.log(K + 1)),
        )
        entry = {"digest": digest(plan.input_ids), "tokens": count}
        lines.append(json.dumps(entry | encoded_top(ids, log_probs)))
    partial = data.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_teacher(partial, teacher_of(data))
    settings = {
        "data": file_digest(data),
        "temperature": distillation_of(args).temperature,
        "top_k": K,
        "checkpoint": {"path": "nobody"},
        "vocabulary": vocabulary_of(processor.tokenizer, architecture.vocab_size),
    }
    facts_of(teacher_of(data)).write_text(json.dumps({"settings": settings}), encoding="utf-8")
