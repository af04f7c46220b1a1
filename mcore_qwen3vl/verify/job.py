"""A training run of ours on the CPU: its command line, its processes, its log and its curve."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.logs.terminal import loss_name

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
    from mcore_qwen3vl.runtime import cpu

    cpu.install(training=True)  # before megatron is imported
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text  # noqa: F401
    import PIL.Image

    import mcore_qwen3vl.owners
    import mcore_qwen3vl.training.checkpoints.run_checkpoints
    import mcore_qwen3vl.training.data_provider
    import mcore_qwen3vl.training.logs.summary
    import mcore_qwen3vl.training.model
    import mcore_qwen3vl.training.objectives
    import mcore_qwen3vl.training.run  # noqa: F401

    PIL.Image.init()


def run_rank(argv: Sequence[str], output: Path) -> None:
    """Run one rank of a training run, and append its output to a file."""
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
            main(CommandLine(argv))
        except SystemExit as leaving:  # Megatron exits so when a signal or a limit stops it
            if leaving.code:
                raise


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
