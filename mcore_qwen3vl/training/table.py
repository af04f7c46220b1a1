"""The table of :mod:`mcore_qwen3vl.training.curves`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mcore_qwen3vl.training.curves import Point, cases, hf_curve, points, train, worst
from mcore_qwen3vl.training.synthetic import write_image_qa

TOLERANCE = 1e-4
"""Relative, in float32: rounding that thirty Adam steps carry along."""


def curves_table(folder: Path, steps: int, only: Sequence[str] | None = None) -> int:
    """Run every case and print a row for each; the number of rows that failed, at most 1."""
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    from mcore_qwen3vl.tiny import write_tiny_checkpoint
    from mcore_qwen3vl.training import cpu as training_cpu

    training_cpu.install()
    torch.set_num_threads(1)  # as our ranks; more only wait for each other on tensors this small
    data = write_image_qa(folder / "data", 40)
    print(f"{'model':6} {'layout':16} {'first':>8} {'last':>8} {'loss diff':>10} {'norm diff':>10}")
    failed = False
    for moe in (False, True):
        checkpoint = write_tiny_checkpoint(folder / f"tiny-{moe}", moe=moe)
        references: dict[tuple[int, int, bool], list[Point]] = {}
        for name, blank in cases(moe).items():
            label = f"{'MoE' if moe else 'dense':6} {name:16}"
            if only and not any(word in label for word in only):
                continue
            job = replace(blank, checkpoint=checkpoint, data=data, steps=steps)
            # What the order of samples depends on; CP pads samples, which changes the packs.
            order = (job.layout.dp, job.layout.cp if job.packing else 1, job.packing)
            if order not in references:
                references[order] = hf_curve(job)
            theirs, ours = references[order], points(train(job, folder / label.strip()))
            difference = worst(ours, theirs)
            good = max(difference.loss, difference.grad_norm) <= TOLERANCE
            failed |= not good
            print(
                f"{label} {ours[0].loss:8.4f} {ours[-1].loss:8.4f} {difference.loss:10.1e} "
                f"{difference.grad_norm:10.1e} {'' if good else 'FAIL'}",
                flush=True,
            )
    return int(failed)
