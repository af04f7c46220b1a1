"""Is training the same? Our loop and a plain Hugging Face loop, on the same samples in one order.

The Hugging Face side shares nothing with ours but the order of the samples: it renders and masks
with the processor, runs one sample at a time, divides the sum of losses by the number of trained
tokens of the step (``num_items_in_batch``; with weights by their sum) and steps
``torch.optim.AdamW``.

    python -m mcore_qwen3vl.verify.curves.run            # the table: layouts x {dense, MoE}
    python -m mcore_qwen3vl.verify.curves.run --resume   # stopped at half, against not stopped
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0

DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
"""Megatron's flags of the distributed optimizer, with all that overlaps."""


@dataclass(frozen=True)
class Point:
    """One step: the loss before it, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    checkpoint: Path
    data: Path
    layout: Layout = field(default_factory=Layout)
    steps: int = 30
    batch: int = 4  # micro-batches of one sequence in a step, over all DP ranks
    seq_length: int = 128
    packing: bool = False
    flags: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The command line of our side."""
        words = [
            "--cpu", "--hf-model", str(self.checkpoint), "--load-hf", str(self.checkpoint),
            "--data-path", str(self.data), "--num-workers", "0",
            "--seq-length", str(self.seq_length), "--micro-batch-size", "1",
            "--global-batch-size", str(self.batch), "--train-iters", str(self.steps),
            "--lr", str(LEARNING_RATE), "--lr-decay-style", "constant",
            "--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]),
            "--adam-eps", str(EPSILON), "--weight-decay", str(WEIGHT_DECAY),
            "--clip-grad", str(CLIP), "--log-interval", "1",
        ]  # fmt: skip
        if Architecture.from_hf(self.checkpoint).is_moe:
            # As HF trains unless output_router_logits is set.
            words += ["--moe-aux-loss-coeff", "0"]
        packing = ["--packing"] if self.packing else []
        return [*words, *packing, *layout_flags(self.layout), *self.flags]


def layout_flags(layout: Layout) -> list[str]:
    """Megatron's flags for `layout`."""
    sizes = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-virtual-stages-per-pipeline-rank": layout.vpp,
        "--expert-model-parallel-size": layout.ep,
        "--context-parallel-size": layout.cp,
    }
    flags = [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]
    flags += ["--expert-tensor-parallel-size", str(layout.etp)]  # Megatron's default is its TP
    return [*flags, *(["--sequence-parallel"] if layout.sp else [])]


def train(job: Job, folder: Path, *flags: str, timeout: float = 600.0) -> list[dict[str, Any]]:
    """Run our training on the CPU, one process a rank.

    Args:
        job: what to run.
        folder: for logs.
        flags: added to the job's.
        timeout: seconds until a hanging run is killed.

    Returns:
        What ``--log-json`` holds for each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    argv = [*job.argv, "--log-json", str(log), *flags]
    run_layout(run_rank, job.layout.world_size, argv, folder / "output.txt", timeout=timeout)
    if not log.exists():  # nothing was left to do
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def run_rank(argv: Sequence[str], output: Path) -> None:
    """One rank of a training run, its output appended to a file."""
    from mcore_qwen3vl.training.run import main

    multiprocessing.current_process().daemon = False  # daemons may not start data workers
    with (
        output.open("a", encoding="utf-8") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        for handler in logging.getLogger().handlers:  # they hold on to the terminal
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(stream)
        try:
            main(argv)
        except SystemExit as leaving:  # Megatron's way out when a signal or a limit stops it
            if leaving.code:
                raise


def points(log: list[dict[str, Any]]) -> list[Point]:
    """The curve of a run's log."""
    return [Point(entry["lm loss"], entry["grad norm"]) for entry in log]


def numbers_of(log: list[dict[str, Any]]) -> list[float]:
    """Losses and gradient norms in turn, to be compared exactly."""
    return [entry[name] for entry in log for name in ("lm loss", "grad norm")]


def sample_order(job: Job) -> list[list[int]]:
    """The lines of the data file that each step trains, over all DP ranks."""
    from mcore_qwen3vl.data.loader import Loader, Source, load_processor
    from mcore_qwen3vl.training.arguments.parser import validate
    from mcore_qwen3vl.training.feed.provider import data_config

    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints every argument
        args = validate(job.argv, job.layout.world_size)
    loaders = [
        Loader(
            [Source(job.data)],
            Architecture.from_hf(job.checkpoint),
            load_processor(job.checkpoint),
            data_config(args),
            dp_rank=rank,
            dp_size=job.layout.dp,
            num_workers=0,
            seed=args.seed,
        )
        for rank in range(job.layout.dp)
    ]
    per_rank = job.batch // job.layout.dp
    return [
        [
            int(name.rsplit("[", 1)[1].rstrip("]"))
            for loader in loaders
            for _ in range(per_rank)
            for name in next(loader).names
        ]
        for _ in range(job.steps)
    ]


def hf_curve(job: Job) -> list[Point]:
    """The plain Hugging Face loop over the same samples."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(job.checkpoint, dtype=torch.float32)
    model.train()
    records = [json.loads(line) for line in job.data.read_text(encoding="utf-8").splitlines()]
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith("bias")]
    kept = [p for n, p in model.named_parameters() if p.ndim <= 1 or n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
    )
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append(Point(total, float(norm)))
    return curve


def encode(
    processor: Any, messages: list[dict[str, Any]], folder: Path
) -> tuple[dict[str, Tensor], Tensor]:
    """One conversation of a question and its answer, by the HF processor alone.

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
    """The messages with lists of parts, and images where they lie."""
    return [{**message, "content": _parts(message["content"], folder)} for message in messages]


def _parts(content: Any, folder: Path) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [
        {**part, "image": str(folder / part["image"])} if part["type"] == "image" else part
        for part in parts
    ]


def worst(ours: Sequence[Point], theirs: Sequence[Point]) -> Point:
    """The largest relative differences of loss and gradient norm over two curves."""
    if len(ours) != len(theirs):
        raise ValueError(f"curves of {len(ours)} and {len(theirs)} steps")
    pairs = list(zip(ours, theirs, strict=True))
    return Point(
        max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs),
        max(abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in pairs),
    )


def cases(moe: bool) -> dict[str, Job]:
    """The layouts of the table, without checkpoint and data."""
    layouts = ["single", "tp2+sp", "pp2xvpp2", "cp2", *(["ep2xdp2"] if moe else []), "dp2"]
    blank = Job(Path(), Path())
    jobs = {name: replace(blank, layout=Layout.parse(name)) for name in layouts}
    jobs["dp2"] = replace(jobs["dp2"], flags=DISTRIBUTED)
    jobs["single, packed"] = replace(blank, packing=True)
    jobs["cp2, packed"] = replace(jobs["cp2"], packing=True)
    return jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a difference exceeds the tolerance."""
    import argparse
    import tempfile

    from mcore_qwen3vl.verify.curves.table import curves_table, resume_table

    parser = argparse.ArgumentParser(description="Training curves against Hugging Face, on the CPU")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these words")
    parser.add_argument("--resume", action="store_true", help="the table of resumed runs instead")
    options = parser.parse_args(arguments)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        if options.resume:
            return resume_table(Path(folder), options.steps)
        return curves_table(Path(folder), options.steps, options.only)


if __name__ == "__main__":
    sys.exit(main())
