"""Gradients that are wrong where activations are right."""

from __future__ import annotations

from dataclasses import asdict

import torch

from mcore_qwen3vl.verify.report.measurement import measure
from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.result import ACTIVATION_GRADIENTS, GRADIENTS, Cause

NEAR = 1e-3
"""How far a ratio may be from a parallel size to be called by its name."""


def find_gradient_cause(divergence: Divergence) -> Cause | None:
    """No gradient at all, or one too large or too small by a parallel size."""
    if divergence.part not in (ACTIVATION_GRADIENTS, GRADIENTS):
        return None
    if divergence.part == ACTIVATION_GRADIENTS:
        found, right = divergence.actual, divergence.expected
    else:
        label = divergence.name.partition("[")[0]
        found = divergence.weights[label].double()
        right = divergence.recording.expected.gradients[label].double()
        if divergence.architecture.expert_layout == "published" and right.ndim == 3:
            right = right.transpose(1, 2)
        found = torch.where(found.isnan(), 0, found)
    if not bool(found.any()):
        return Cause(
            "no gradient", f"No gradient reaches {divergence.name}.", "All values are zero."
        )
    ratio = float((found * right).sum() / right.square().sum())
    left = measure(found, ratio * right).relative
    if left > divergence.tolerance:
        return None
    return Cause(
        "gradient scale",
        f"The gradient of {divergence.name} is {ratio:.6g} times the right one"
        f"{_meaning(divergence, ratio)}.",
        f"Divided by that number it is right to {left:.1e}.",
    )


def _meaning(divergence: Divergence, ratio: float) -> str:
    for name, size in asdict(divergence.case.layout).items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 2:
            continue
        for value, what in ((size, name.upper()), (1 / size, f"1 / {name.upper()}")):
            if abs(ratio / value - 1) < NEAR:
                return f", which is {what}"
    return ""
