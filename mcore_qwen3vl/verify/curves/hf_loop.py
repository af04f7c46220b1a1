"""A plain Hugging Face training loop, which shares only the order of the samples with ours.

It renders and masks with the processor, runs one sample at a time, divides the sum of losses by the
number of trained tokens of the step (``num_items_in_batch``; their weighted number if samples have
weights) and steps ``torch.optim.AdamW``, or another optimizer that it is given.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.verify.curves.job import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Job,
    StepMetrics,
)
from mcore_qwen3vl.verify.parity.reference import decay_groups, with_adapter

Split = Literal["train", "val"]


def sample_order(job: Job) -> list[list[int]]:
    """Return the data file's line indices (from 0) that each step trains, over all DP ranks."""
    return [list(chain.from_iterable(step)) for step in batch_order(job)]


def batch_order(job: Job) -> list[list[list[int]]]:
    """Return :func:`sample_order` with a list for each micro-batch of a step."""
    return [
        [[int(name.rsplit(":", 1)[1]) - 1 for name in batch] for batch in step]  # lines are from 1
        for step in batch_names(job, job.data, job.steps)
    ]


def batch_names(
    job: Job, data: Path, steps: int, *, split: Split = "train"
) -> list[list[tuple[str, ...]]]:
    """Return the file and the line of the samples of each step's micro-batches, over all DP ranks.

    Args:
        job: the run.
        data: its training or validation data.
        steps: number of steps.
        split: part of `data` that is read.
    """
    from mcore_qwen3vl.data.loader import Loader, load_processor
    from mcore_qwen3vl.data.loading.sources import parse_sources
    from mcore_qwen3vl.training.arguments.parser import validate
    from mcore_qwen3vl.training.broadcast.provider import data_config

    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints every argument
        args = validate(job.argv, job.layout.world_size)
    loaders = [
        Loader(
            parse_sources([str(data)]),
            Architecture.from_hf(job.checkpoint),
            load_processor(job.checkpoint),
            data_config(args),
            dp_rank=rank,
            dp_size=job.layout.dp,
            num_workers=0,
            split=split,
            seed=args.seed,
        )
        for rank in range(job.layout.dp)
    ]
    per_rank = args.global_batch_size // job.layout.dp // args.micro_batch_size
    return [
        [next(loader).names for loader in loaders for _ in range(per_rank)] for _ in range(steps)
    ]


def adamw(trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's AdamW with the job's settings, for parameters by their names in the model."""
    groups = decay_groups(trained, WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)


def hf_curve(
    job: Job, optimizer_of: Callable[[Mapping[str, nn.Parameter]], Any] = adamw
) -> list[StepMetrics]:
    """Return the curve of the plain Hugging Face loop over the same samples.

    Args:
        job: the run.
        optimizer_of: function from the trained parameters, by name, to their optimizer.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(job.checkpoint, dtype=torch.float32)
    if job.lora is not None:
        model = with_adapter(model, job.lora)
    model.train()
    records = [json.loads(line) for line in job.data.read_text(encoding="utf-8").splitlines()]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_of(trained)
    curve = []
    for lines in sample_order(job):
        samples = [encode(processor, records[line]["messages"], job.data.parent) for line in lines]
        weights = [records[line].get("weight", 1.0) for line in lines]
        items = sum(
            weight * int((labels != -100).sum())
            for (_, labels), weight in zip(samples, weights, strict=True)
        )
        optimizer.zero_grad()
        total = 0.0
        for (inputs, labels), weight in zip(samples, weights, strict=True):
            logits = model(**inputs).logits[0, :-1]
            loss = weight * F.cross_entropy(logits, labels[1:], reduction="sum") / items
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        curve.append(StepMetrics(total, float(norm)))
    return curve


def encode(
    processor: Any, messages: list[dict[str, Any]], folder: Path
) -> tuple[dict[str, Tensor], Tensor]:
    """Encode one conversation of a question and its answer with the HF processor alone.

    Returns:
        The model's inputs, and labels (S,) that train the answer and its end-of-turn token.
    """
    turns = located(messages, folder)
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(turns[:1], add_generation_prompt=True, **options)
    whole = processor.apply_chat_template(turns, **options)
    tokens = whole["input_ids"][0]
    labels = tokens.clone()
    labels[: prompt["input_ids"].shape[1]] = -100
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    labels[int((tokens == end).nonzero()[-1]) + 1 :] = -100  # what follows the last turn
    return dict(whole), labels


def located(messages: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the messages with contents as lists of parts and image paths below `folder`."""
    return [{**message, "content": _parts(message["content"], folder)} for message in messages]


def _parts(content: Any, folder: Path) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [
        {**part, "image": str(folder / part["image"])} if part["type"] == "image" else part
        for part in parts
    ]
