"""Gradients that are wrong where activations are right."""

from __future__ import annotations

from dataclasses import asdict

import torch

from mcore_qwen3vl.verify.report.compare import measure
from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.result import GRADIENTS, SLOPES, Cause

NEAR = 1e-3
"""How far a ratio may be from a parallel size to be called by its name."""


def find_gradient_cause(scene: Scene) -> Cause | None:
    """No gradient at all, or one too large or too small by a parallel size."""
    if scene.part not in (SLOPES, GRADIENTS):
        return None
    if scene.part == SLOPES:
        found, right = scene.actual, scene.expected
    else:
        label = scene.name.partition("[")[0]
        found = scene.weights[label].double()
        right = scene.recording.expected.gradients[label].double()
        if scene.truth.expert_layout == "published" and ".mlp.experts." in label:
            right = right.transpose(1, 2)
        found = torch.where(found.isnan(), 0, found)
    if not bool(found.any()):
        return Cause("no gradient", f"No gradient reaches {scene.name}.", "All values are zero.")
    ratio = float((found * right).sum() / right.square().sum())
    left = measure(found, ratio * right).relative
    if left > scene.tolerance:
        return None
    return Cause(
        "gradient scale",
        f"The gradient of {scene.name} is {ratio:.6g} times the right one{_meaning(scene, ratio)}.",
        f"Divided by that number it is right to {left:.1e}.",
    )


def _meaning(scene: Scene, ratio: float) -> str:
    for name, size in asdict(scene.case.layout).items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 2:
            continue
        for value, what in ((size, name.upper()), (1 / size, f"1 / {name.upper()}")):
            if abs(ratio / value - 1) < NEAR:
                return f", which is {what}"
    return ""
