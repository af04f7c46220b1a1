"""The first step of a training run: its loss and every gradient beside those of a plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.live import factor_parts, gradient, hf_parts, unwrap
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.run import Run
from mcore_qwen3vl.verification.curves import Job, run_rank
from mcore_qwen3vl.verification.measurement import Measurements, measure, merge
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verification.parity.on_rank import IN_MEMORY
from mcore_qwen3vl.verification.parity.reference import Reference
from tests.training.log import entries_of

TOLERANCE = 2e-5


def step_job(
    checkpoint: Path, data: Path, layout: str, *flags: str, steps: int = 1, **options: Any
) -> Job:
    """Return a job, packed if the flags say so, with sequences of 256 tokens unless told else."""
    return Job(
        checkpoint,
        data,
        Layout.parse(layout),
        steps,
        packing="--packing" in flags,
        flags=tuple(flag for flag in flags if flag != "--packing"),
        **{"seq_length": 256, **options},
    )


def random_adapter(folder: Path, checkpoint: Path) -> Path:
    """Return an adapter of what the checkpoint has, in the folder; it is written once."""
    adapter = folder / "adapter"
    if not adapter.exists():
        a = Architecture.from_hf(checkpoint)
        targets = ("router" if a.is_moe else "language") if a.delta_net is None else "hybrid"
        write_random_adapter(adapter, ADAPTERS[targets], checkpoint)
    return adapter


@dataclass(frozen=True)
class Plain:
    """The loss of the first step of a job, and its gradients by their names in a checkpoint."""

    loss: float
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, loss: Tensor, named: dict[str, nn.Parameter]) -> Plain:
        """Run the backward pass of `loss`."""
        loss.backward()
        return cls(loss.item(), {n: p.grad for n, p in named.items() if p.grad is not None})


def plain_model(job: Job, *, headless: bool = False) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return Hugging Face's model, with the job's adapter, and what trains by its name there."""
    from transformers import AutoModel, AutoModelForImageTextToText

    if job.lora is not None:
        adapted = Reference(job.checkpoint, job.lora)
        return adapted.network.model if headless else adapted.network, adapted.trained
    kind = AutoModel if headless else AutoModelForImageTextToText
    model = kind.from_pretrained(job.checkpoint, dtype=torch.float32)
    prefix = "model." if headless else ""
    return model, {f"{prefix}{name}": one for name, one in model.named_parameters()}


def _measured_on_rank(argv: list[str], output: Path, expected: Plain) -> Measurements:
    """Train one step on this rank, and compare the gradients that the optimizer would take."""
    found: Measurements = {}
    finalize = Run._finalize_gradients

    def compare(self: Run, model: list[Any], *rest: Any, **named: Any) -> None:
        finalize(self, model, *rest, **named)
        chunks = unwrap(model)
        base = hf_parts(chunks, gradient, expert_layout=IN_MEMORY)
        parts = chain(base, factor_parts(chunks, gradient))
        each = [(p, expected.gradients[p.name][p.box]) for p in parts]
        one = ({("", p.name): measure(p.local, right, main=p.main)} for p, right in each)
        found.update(merge([found, *one]))

    Run._finalize_gradients = compare  # type: ignore[method-assign]
    run_rank(argv, output)
    return found


def check_step(
    job: Job, expected: Plain, loss: str, folder: Path, limit: float = TOLERANCE
) -> dict[str, float]:
    """Train one step, compare its loss and gradients with `expected`, and return the log's entry.

    Args:
        job: the run, of one step.
        expected: what the plain loop found.
        loss: name of the loss in the log.
        folder: where the run writes.
        limit: of the gradients' relative error.
    """
    argv = [*job.argv, "--log-json", str(folder / "log.jsonl")]
    ranks = run_layout(
        _measured_on_rank, job.layout.world_size, argv, folder / "output.txt", expected, timeout=300
    )
    whole = {name: one for (_, name), one in merge(ranks).items()}
    assert {n: m.count for n, m in whole.items()} == {
        name: one.numel() for name, one in expected.gradients.items()
    }
    entry: dict[str, float] = entries_of(folder)[0]
    of_loss = abs(entry[loss] - expected.loss) / abs(expected.loss)
    name, worst = max(whole.items(), key=lambda item: item[1].relative)
    print(f"observed: {job.layout} loss {of_loss:.1e}, gradient {worst.relative:.1e} of {name}")
    assert of_loss <= TOLERANCE
    assert worst.relative <= limit, name
    return entry
