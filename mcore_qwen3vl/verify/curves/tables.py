"""The tables of training curves: against Hugging Face, and after a resume."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.converters.mcore.paths import TRACKER
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verify.curves.hf_loop import hf_curve
from mcore_qwen3vl.verify.curves.job import (
    DISTRIBUTED,
    Job,
    StepMetrics,
    curve_of,
    train,
    worst_difference,
)

TOLERANCE = 1e-4
"""Largest relative difference in float32: thirty Adam steps carry rounding errors along."""


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
        ("tp2+sp", "--use-distributed-optimizer", "--num-workers", "2"),
    ),
    (
        False,
        ("dp2", *DISTRIBUTED, "--packing"),
        ("single", "--use-distributed-optimizer", "--packing"),
    ),
)
"""Whether the model is MoE, and the layout and flags before and after a stop."""

OTHER_LAYOUT = 1e-5
"""Largest relative difference in float32 after a resume at another layout. After one at the same
layout, no bit may differ."""


def cases(moe: bool) -> dict[str, Job]:
    """Return the jobs of the table by name, without checkpoint and data."""
    layouts = ["single", "tp2+sp", "pp2xvpp2", "cp2", *(["ep2xdp2"] if moe else []), "dp2"]
    blank = Job(Path(), Path())
    jobs = {name: replace(blank, layout=Layout.parse(name)) for name in layouts}
    jobs["dp2"] = replace(jobs["dp2"], flags=DISTRIBUTED)
    jobs["single, packed"] = replace(blank, packing=True)
    jobs["cp2, packed"] = replace(jobs["cp2"], packing=True)
    return jobs


def install() -> None:
    """Install the CPU backend, before megatron is imported."""
    from mcore_qwen3vl.runtime import cpu

    cpu.install(training=True)
    torch.set_num_threads(1)  # as on our ranks; on small tensors, more only wait for each other


def curves_table(folder: Path, steps: int, only: Sequence[str] | None = None) -> int:
    """Run every case and print a row for each; return 1 if a row failed."""
    install()
    from mcore_qwen3vl.tiny import write_tiny_checkpoint

    data = write_image_qa(folder / "data", 40)
    print(f"{'model':6} {'layout':16} {'first':>8} {'last':>8} {'loss diff':>10} {'norm diff':>10}")
    failed = False
    for moe in (False, True):
        checkpoint = write_tiny_checkpoint(folder / f"tiny-{moe}", moe=moe)
        references: dict[tuple[int, int, bool], list[StepMetrics]] = {}
        for name, blank in cases(moe).items():
            label = f"{'MoE' if moe else 'dense':6} {name:16}"
            if only and not any(word in label for word in only):
                continue
            job = replace(blank, checkpoint=checkpoint, data=data, steps=steps)
            # The order of samples depends on these; CP pads samples, which changes the packs.
            order = (job.layout.dp, job.layout.cp if job.packing else 1, job.packing)
            if order not in references:
                references[order] = hf_curve(job)
            theirs, ours = references[order], curve_of(train(job, folder / label.strip()))
            difference = worst_difference(ours, theirs)
            label = f"{label} {ours[0].loss:8.4f} {ours[-1].loss:8.4f}"
            failed |= not _judged(label, difference, TOLERANCE)
    return int(failed)


def resume_table(folder: Path, steps: int) -> int:
    """Stop runs halfway, resume them and compare with full runs; return 1 if a row failed."""
    install()
    from mcore_qwen3vl.tiny import write_tiny_checkpoint

    data = write_image_qa(folder / "data", 40)
    checkpoints = {moe: write_tiny_checkpoint(folder / f"{moe}", moe=moe) for moe in (False, True)}
    print(f"{'model':6} {'before':9} {'after':9} {'loss diff':>10} {'norm diff':>10}")
    failed = False
    for index, (moe, before, after) in enumerate(RESUMES):
        blank, place = Job(checkpoints[moe], data, steps=steps), folder / str(index)
        first, then = (
            replace(blank, layout=Layout.parse(layout), flags=tuple(flags))
            for layout, *flags in (before, after)
        )
        whole, save = whole_and_half(first, place)
        rest = train(then, place / "rest", "--save", str(save), "--save-interval", "1000")
        difference = worst_difference(curve_of(rest), curve_of(whole[steps // 2 :]))
        limit = 0.0 if before == after else OTHER_LAYOUT
        label = f"{'MoE' if moe else 'dense':6} {before[0]:9} {after[0]:9}"
        failed |= not _judged(label, difference, limit)
    return int(failed)


def _judged(label: str, difference: StepMetrics, limit: float) -> bool:
    """Print a row, and return whether its difference is within the limit."""
    good = max(difference.loss, difference.grad_norm) <= limit
    numbers = f"{difference.loss:10.1e} {difference.grad_norm:10.1e}"
    print(f"{label} {numbers} {'' if good else 'FAIL'}", flush=True)
    return good


def whole_and_half(job: Job, folder: Path) -> tuple[list[dict[str, Any]], Path]:
    """Return the log of a whole run, and its checkpoint folder put back to half of the steps."""
    save, half = folder / "save", job.steps // 2
    whole = train(job, folder / "whole", "--save", str(save), "--save-interval", str(half))
    (save / TRACKER).write_text(str(half), "utf-8")
    shutil.rmtree(save / f"iter_{job.steps:07d}")
    return whole, save
