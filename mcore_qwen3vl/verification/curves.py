"""Our training loop on the CPU, compared with a plain Hugging Face loop, and with a resumed run.

python -m mcore_qwen3vl.verification.curves            # the table: layouts x {dense, MoE}
python -m mcore_qwen3vl.verification.curves --resume   # runs stopped halfway, against full runs

A :class:`Job` is a training run of ours: its command line, its processes, its log and its curve.

The plain loop shares only the order of the samples with ours. It renders and masks with the
processor, runs one sample at a time, divides the sum of losses by the number of trained tokens of
the step (``num_items_in_batch``; their weighted number if samples have weights) and steps
``torch.optim.AdamW``, or another optimizer that it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.converters.identify import TRACKER
from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.events import RunObserver
from mcore_qwen3vl.training.logs.terminal import loss_name
from mcore_qwen3vl.verification.figures import write_figures
from mcore_qwen3vl.verification.parity.reference import decay_groups, with_adapter

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0

DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
"""Megatron's flags for the distributed optimizer with all of its overlaps."""


@dataclass(frozen=True)
class Job:
    """The model, data and settings of a training run."""

    checkpoint: Path
    data: Path
    layout: Layout = field(default_factory=Layout)
    steps: int = 30
    batch: int = 4  # micro-batches of one sequence in a step, over all DP ranks
    seq_length: int = 128
    packing: bool = False
    lora: Path | None = None  # a PEFT adapter that both sides start from; they train only it
    converted: Path | None = None  # LoRA's base model as a Megatron-Core checkpoint
    flags: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The command line of our side."""
        words = [
            "--cpu", "--hf-model", str(self.checkpoint),
            *(("--pretrained-checkpoint", str(self.converted)) if self.converted else
              ("--load-hf", str(self.checkpoint))),
            "--data-path", str(self.data), "--num-workers", "0",
            "--seq-length", str(self.seq_length), "--micro-batch-size", "1",
            "--global-batch-size", str(self.batch), "--train-iters", str(self.steps),
            "--lr", str(LEARNING_RATE), "--lr-decay-style", "constant",
            "--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]),
            "--adam-eps", str(EPSILON), "--weight-decay", str(WEIGHT_DECAY),
            "--clip-grad", str(CLIP), "--log-interval", "1",
        ]  # fmt: skip
        if Architecture.from_hf(self.checkpoint).is_moe:
            # HF trains without this loss unless output_router_logits is set.
            words += ["--moe-aux-loss-coeff", "0"]
        # A pack's work depends on what is trained, which the plain loop's loader is not told.
        words += ["--lora-init", str(self.lora), "--no-balance"] if self.lora else []
        packing = ["--packing"] if self.packing else []
        return [*words, *packing, *self.layout.flags(moe=True), *self.flags]


def train(job: Job, folder: Path, *flags: str, timeout: float = 600.0) -> list[dict[str, Any]]:
    """Run our training on the CPU, one process per rank, with `flags` added to the job's.

    Returns:
        The entry of ``--log-json`` for each step.
    """
    import_for_ranks()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    argv = [*job.argv, "--log-json", str(log), *flags]
    run_layout(run_rank, job.layout.world_size, argv, folder / "output.txt", timeout=timeout)
    if not log.exists():  # nothing was left to do
        return []
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if loss_name(entry)]  # the others are validations


def import_for_ranks() -> None:
    """Import here, once, what each forked rank would take seconds to import again."""
    cpu.install(training=True)  # before megatron is imported
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text  # noqa: F401
    import PIL.Image

    PIL.Image.init()


def run_rank(argv: Sequence[str], output: Path, observer: RunObserver | None = None) -> int:
    """Run one rank of a training run, append its output to a file, and return its exit code.

    `observer` hears of the run's events.
    """
    from mcore_qwen3vl.training.arguments.command_line import CommandLine
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
            return main(CommandLine(argv), observer)
        except SystemExit as leaving:  # Megatron exits so when a signal or a limit stops it
            if leaving.code:
                raise
            return 0


@dataclass(frozen=True)
class StepMetrics:
    """The loss before one step, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


def curve_of(log: list[dict[str, Any]]) -> list[StepMetrics]:
    """Return the curve of a run's log."""
    named = [(loss_name(entry), entry) for entry in log]
    return [StepMetrics(entry[name], entry["grad norm"]) for name, entry in named if name]


def worst_difference(ours: Sequence[StepMetrics], theirs: Sequence[StepMetrics]) -> StepMetrics:
    """Return the largest relative differences of loss and gradient norm over two curves."""
    if len(ours) != len(theirs):
        raise ValueError(f"curves of {len(ours)} and {len(theirs)} steps")
    pairs = list(zip(ours, theirs, strict=True))
    return StepMetrics(
        max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs),
        max(abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in pairs),
    )


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
    job: Job, data: Path, steps: int, *, split: Literal["train", "val"] = "train"
) -> list[list[tuple[str, ...]]]:
    """Return the file and the line of the samples of each step's micro-batches, over all DP ranks.

    `data` is the run's training or validation data.
    """
    from mcore_qwen3vl.data.config import parse_sources
    from mcore_qwen3vl.data.loader import Loader
    from mcore_qwen3vl.data.processor import load_processor
    from mcore_qwen3vl.training.arguments.parser import validate
    from mcore_qwen3vl.training.data_provider import data_config, validation_config

    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints every argument
        settings = validate(job.argv, job.layout.world_size).settings
    loop, config = settings.loop, data_config(settings)
    per_step = loop.global_batch_size
    if split == "val":
        config, per_step = validation_config(settings), loop.eval_global_batch_size
    per_rank = per_step // job.layout.dp // config.micro_batch_size
    loaders = [
        Loader(
            parse_sources([str(data)]),
            Architecture.from_hf(job.checkpoint),
            load_processor(job.checkpoint),
            config,
            dp_rank=rank,
            dp_size=job.layout.dp,
            num_workers=0,
            split=split,
            seed=loop.seed,
            batches=steps * per_rank if split == "val" else None,
        )
        for rank in range(job.layout.dp)
    ]
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

    `optimizer_of` takes the trained parameters, by name.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)  # a tokenizer, if there is no tower
    has_vision = Architecture.from_hf(job.checkpoint).has_vision
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    with without_gpu_kernels():
        model = auto.from_pretrained(job.checkpoint, dtype=torch.float32)
    if job.lora is not None:
        model = with_adapter(model, job.lora)
    model.train()
    records = [json.loads(line) for line in job.data.read_text(encoding="utf-8").splitlines()]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_of(trained)
    curve = []
    for lines in sample_order(job):
        samples = [
            encode_conversation(processor, records[line]["messages"], job.data.parent)
            for line in lines
        ]
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


def encode_conversation(
    processor: Any, messages: list[dict[str, Any]], folder: Path
) -> tuple[dict[str, Tensor], Tensor]:
    """Encode one conversation of a question and its answer with the HF processor alone.

    Returns:
        The model's inputs, and labels (S,) that train the answer and its end-of-turn token.
    """
    turns = with_image_paths(messages, folder)
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(turns[:1], add_generation_prompt=True, **options)
    inputs = processor.apply_chat_template(turns, **options)
    tokens = inputs["input_ids"][0]
    labels = tokens.clone()
    labels[: prompt["input_ids"].shape[1]] = -100
    tokenizer = getattr(processor, "tokenizer", processor)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    labels[int((tokens == end).nonzero()[-1]) + 1 :] = -100  # what follows the last turn
    return dict(inputs), labels


def with_image_paths(messages: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the messages with contents as lists of parts and image paths below `folder`."""
    turns = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        placed = [
            {**part, "image": str(folder / part["image"])} if part["type"] == "image" else part
            for part in parts
        ]
        turns.append({**message, "content": placed})
    return turns


TOLERANCE = 1e-4
"""Largest relative difference in float32: thirty Adam steps carry rounding errors along."""


SHARDED = DISTRIBUTED[:1]
RESUMES = (
    (False, ("single", "--packing"), ("single", "--packing")),
    (False, ("tp2+sp", "--packing"), ("tp2+sp", "--packing")),
    (False, ("pp2xvpp2",), ("pp2xvpp2",)),
    (False, ("cp2",), ("cp2",)),
    (False, ("dp2", *DISTRIBUTED), ("dp2", *DISTRIBUTED)),
    (True, ("ep2xdp2", *DISTRIBUTED), ("ep2xdp2", *DISTRIBUTED)),
    (False, ("tp2+sp",), ("pp2",)),
    (
        False,
        ("dp2", *DISTRIBUTED, "--num-workers", "1"),
        ("tp2+sp", *SHARDED, "--num-workers", "2"),
    ),
    (False, ("dp2", *DISTRIBUTED, "--packing"), ("single", *SHARDED, "--packing")),
)
"""Whether the model is MoE, and the layout and flags before and after a stop."""

OTHER_LAYOUT = 1e-5
"""Largest relative difference in float32 after a resume at another layout. After one at the same
layout, no bit may differ."""


def table_jobs(moe: bool) -> dict[str, Job]:
    """Return the jobs of the table by name, without checkpoint and data."""
    layouts = ["single", "tp2+sp", "pp2xvpp2", "cp2", *(["ep2xdp2"] if moe else []), "dp2"]
    blank = Job(Path(), Path())
    jobs = {name: replace(blank, layout=Layout.parse(name)) for name in layouts}
    jobs["dp2"] = replace(jobs["dp2"], flags=DISTRIBUTED)
    jobs["single, packed"] = replace(blank, packing=True)
    jobs["cp2, packed"] = replace(jobs["cp2"], packing=True)
    return jobs


Row = tuple[str, bool]
"""A row of a table in Markdown, and whether its differences are within the limit."""


def curve_rows(folder: Path, steps: int, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Run every case, and yield its row."""
    data = write_image_qa(folder / "data", 40)
    for moe in (False, True):
        checkpoint = write_tiny_checkpoint(folder / f"tiny-{moe}", moe=moe)
        references: dict[tuple[int, int] | None, list[StepMetrics]] = {}
        for name, blank in table_jobs(moe).items():
            model = "MoE" if moe else "dense"
            if only and not any(word in f"{model} {name}" for word in only):
                continue
            job = replace(blank, checkpoint=checkpoint, data=data, steps=steps)
            # Packs depend on these: CP pads samples. The order of samples depends on nothing.
            order = (job.layout.dp, job.layout.cp) if job.packing else None
            if order not in references:
                references[order] = hf_curve(job)
            theirs, ours = references[order], curve_of(train(job, folder / f"{model} {name}"))
            cells = (model, name, f"{ours[0].loss:.4f}", f"{ours[-1].loss:.4f}")
            yield _row(cells, worst_difference(ours, theirs), TOLERANCE)


def resume_rows(folder: Path, steps: int) -> Iterator[Row]:
    """Stop runs halfway, resume them, compare them with full runs, and yield a row for each."""
    data = write_image_qa(folder / "data", 40)
    checkpoints = {moe: write_tiny_checkpoint(folder / f"{moe}", moe=moe) for moe in (False, True)}
    for index, (moe, before, after) in enumerate(RESUMES):
        blank, place = Job(checkpoints[moe], data, steps=steps), folder / str(index)
        first, then = (
            replace(blank, layout=Layout.parse(layout), flags=tuple(flags))
            for layout, *flags in (before, after)
        )
        full, save = train_and_rewind(first, place)
        rest = train(then, place / "rest", "--save", str(save), "--save-interval", "1000")
        difference = worst_difference(curve_of(rest), curve_of(full[steps // 2 :]))
        limit = 0.0 if before == after else OTHER_LAYOUT
        yield _row(("MoE" if moe else "dense", before[0], after[0]), difference, limit)


def _row(cells: Sequence[str], difference: StepMetrics, limit: float) -> Row:
    good = max(difference.loss, difference.grad_norm) <= limit
    numbers = [f"{difference.loss:.1e}", f"{difference.grad_norm:.1e}"]
    row = " | ".join([*cells, *numbers, f"{limit:.0e}" if good else "**FAIL**"])
    return f"| {row} |", good


def train_and_rewind(job: Job, folder: Path) -> tuple[list[dict[str, Any]], Path]:
    """Train to the end; return the log, and the checkpoint folder put back to half of the steps."""
    save, half = folder / "save", job.steps // 2
    full = train(job, folder / "whole", "--save", str(save), "--save-interval", str(half))
    (save / TRACKER).write_text(str(half), "utf-8")
    shutil.rmtree(save / f"iter_{job.steps:07d}")
    return full, save


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and return 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_qwen3vl.verification.curves",
        description="Training curves against Hugging Face, on the CPU",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these words")
    parser.add_argument("--resume", action="store_true", help="the table of resumed runs instead")
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    options = parser.parse_args(arguments)
    quiet_libraries()
    cpu.install(training=True)  # before megatron is imported
    torch.set_num_threads(1)  # as on our ranks; on small tensors, more only wait for each other
    columns = ["model", *(["before", "after"] if options.resume else ["layout", "first", "last"])]
    columns += ["loss differs by", "norm differs by", "limit"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    print(*lines, sep="\n")
    failed = False
    with scratch_folder() as folder:
        rows = (
            resume_rows(folder, options.steps)
            if options.resume
            else curve_rows(folder, options.steps, options.only)
        )
        for line, good in rows:
            print(line, flush=True)
            lines.append(line)
            failed |= not good
    if options.page:
        title = "Resumed runs beside uninterrupted ones" if options.resume else "Training curves"
        command = f"{parser.prog}{' --resume' if options.resume else ''} --steps {options.steps}"
        write_figures(options.page, title, command, "\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
