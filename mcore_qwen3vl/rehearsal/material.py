"""The made-up model, data and teacher of a rehearsal, of which only the sizes matter."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hub import resolve
from mcore_qwen3vl.converters.place import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import TEACHER_TOP_K as K
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in
from mcore_qwen3vl.training.arguments.run import DISTILL, KTO, LOSSES
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.second_model import source_of

SAMPLES_OF_A_PACK = 16
SHORTEST = 128  # tokens of a sample: below that there is no room for the chat template
LARGEST_IMAGE = 16  # tokens along its side
_FEWEST_SAMPLES = 64
_RANDOM_START = (
    *("--load", "--load-hf", "--pretrained-checkpoint", "--finetune"),
    *("--save", "--save-interval", "--save-hf", "--save-hf-interval"),
)
_NOT_REHEARSED = (
    *("--valid-data-path", "--eval-iters", "--eval-interval", "--full-validation"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    *("--log-json", "--train-samples", "--rampup-batch-size"),
    *("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples"),
    *("--lr-decay-iters", "--lr-decay-samples"),
)
ITERATIONS = 2
"""The first iteration allocates Adam's moments; the second is the one that counts."""


def prepare(command: Command, folder: Path) -> Command:
    """Return the command to rehearse: two short iterations, random weights, data from `folder`.

    With ``--data-path`` the user's own data and processor are used. Otherwise both are made up:
    conversations half of whose tokens are one or more images, sixteen to a pack, in a byte-level
    vocabulary of our own. They go through the real encoding, packing and batching.

    Raises:
        BadInput: ``--data-path`` without a processor, sequences too short to make data for, or a
            task without ``--data-path``.
    """
    model = command.line.model
    data = command.value("--data-path") or command.value("--train-data-path")
    task = command.value("--task")
    if task is not None and data is None:
        raise BadInput(
            f"--task {task} is rehearsed on your own records: give --data-path. Or drop --task, to "
            "rehearse the same layout with a language model's loss on made-up data."
        )
    prepared = command.without(*_RANDOM_START, *_NOT_REHEARSED)
    if data is None:
        prepared = _made_up(prepared, model, folder)
    elif not (model / "tokenizer_config.json").exists():
        raise BadInput(
            f"{model} has no tokenizer, so {data} cannot be read: copy the tokenizer and processor "
            "files beside the config, or leave --data-path out for made-up data."
        )
    elif source := source_of(command.settings):  # no flag names what training starts from any more
        prepared = prepared.plus(*source)
    if command.settings.compute.moe_token_dispatcher_type == "flex":
        prepared = prepared.noting(
            "DeepEP is a stub here, with its launches, host syncs and sizes, whether or not it is "
            "installed"
        )
    count = command.rehearsed_micro_batches
    batch = count * command.settings.data.micro_batch_size * command.layout.dp
    if count < command.micro_batches:
        prepared = prepared.noting(
            f"only {count} of the {command.micro_batches} micro-batches of an iteration were run: "
            "launches, host syncs, bytes and FLOPs count these alone"
        )
    return prepared.plus(
        *("--train-iters", ITERATIONS, "--num-workers", 0, "--global-batch-size", batch),
        "--no-balance",  # so that nothing is read twice
    )


def sample_of(command: Command) -> tuple[int, int]:
    """Return the tokens of each made-up sample, and those along the side of its images."""
    tokens = command.settings.data.seq_length
    if command.value("--packing") is not None:
        tokens = max(tokens // SAMPLES_OF_A_PACK, SHORTEST)
    return tokens, min(int((tokens / 2) ** 0.5), LARGEST_IMAGE)


def _made_up(command: Command, model: Path, folder: Path) -> Command:
    settings, seq_length = command.settings, command.settings.data.seq_length
    if seq_length < SHORTEST:
        raise BadInput(
            f"--seq-length {seq_length}: made-up samples have at least {SHORTEST} tokens; raise "
            "it, or give --data-path."
        )
    tokens, side = sample_of(command)
    images = max(round(tokens / 2 / side**2), 1)
    config = _config(model)
    write_stand_in(config, folder / "model")
    if source := source_of(command.settings):
        second = identify(resolve(source.path, weights=False)).config()
        write_stand_in(_config(second), folder / "second")
        command = command.plus(source.flag, folder / "second")
    vision = Architecture.from_hf(config).vision
    file = write_half_images(
        folder / "data",
        # A pack holds samples of one epoch, so each rank has enough of them for two.
        samples=max(_FEWEST_SAMPLES, 2 * SAMPLES_OF_A_PACK * command.layout.dp),
        tokens=tokens,
        images=images,
        image_side=side,
        token_pixels=vision.patch_size * vision.spatial_merge_size,
        pairs=command.value("--loss") in LOSSES,
        labelled=command.value("--loss") == KTO,
    )
    if settings.training.loss == DISTILL and not settings.distillation.teacher:
        write_made_up(file, folder / "model", settings)
    return command.plus("--hf-model", folder / "model", "--data-path", file).noting(
        f"made-up data: samples of {tokens} tokens, with {images} image{'s' * (images > 1)} of "
        f"{side} x {side} tokens each"
    )


def _config(model: Path) -> Path:
    return model / "config.json" if model.is_dir() else model


def write_made_up(data: Path, model: Path, settings: Settings) -> None:
    """Write the file of a teacher for whom K tokens and all others together are equally likely."""
    # Imported here, because they take seconds.
    from mcore_qwen3vl.data.config import DataConfig
    from mcore_qwen3vl.data.loading.datasets import CrudeSamples
    from mcore_qwen3vl.data.loading.sources import parse_sources
    from mcore_qwen3vl.data.processor import load_processor
    from mcore_qwen3vl.data.scores import (
        digest,
        encoded_top,
        facts_of,
        file_digest,
        teacher_of,
        vocabulary_of,
        write_teacher,
    )
    from mcore_qwen3vl.scoring.records import Records

    processor, architecture = load_processor(model), Architecture.from_hf(model)
    sources = parse_sources([str(data)])
    samples = CrudeSamples(sources, split="train", trust=False)
    config = DataConfig(settings.data.seq_length, media=settings.data.media)
    records = Records(samples, sources, architecture, processor, config, 1)
    lines = []
    for micro in records.plan(range(len(samples))):
        plan = micro[0].plan
        count = plan.trained_tokens
        ids, scores = np.tile(np.arange(K), (count, 1)), np.full((count, K + 1), -math.log(K + 1))
        entry = {"digest": digest(plan.input_ids), "tokens": count}
        lines.append(json.dumps(entry | encoded_top(ids, scores)))
    partial = data.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_teacher(partial, teacher_of(data))
    facts = {
        "data": file_digest(data),
        "temperature": settings.distillation.loss.temperature,
        "top_k": K,
        "checkpoint": {"path": "nobody"},
        "vocabulary": vocabulary_of(processor.tokenizer, architecture.vocab_size),
    }
    facts_of(teacher_of(data)).write_text(json.dumps({"settings": facts}), encoding="utf-8")
