"""A norm with the right weight and a wrong result: its epsilon is solved from input and output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.recording import replay
from mcore_qwen3vl.verify.trace.result import Cause

EPSILON_NAMES = ("variance_epsilon", "eps")


def find_norm_cause(divergence: Divergence) -> Cause | None:
    """Another epsilon, or no norm at all."""
    point = divergence.forward
    if point is None or point.side == "input":
        return None
    module: Any = divergence.model.get_submodule(point.module)
    attribute = next((n for n in EPSILON_NAMES if hasattr(module, n)), None)
    if attribute is None:
        return None
    calls = divergence.recording.calls[point.module]
    inputs = divergence.recording.assemble(
        point, [args[0] for args, _, _ in calls][: _samples(divergence)]
    )
    if divergence.explains(inputs):
        return Cause(
            "missing norm",
            f"{divergence.name} passes its input on unchanged.",
            divergence.evidence("The input", inputs),
        )
    right = float(getattr(module, attribute))
    for epsilon in _candidates(_solve(divergence, module, inputs.flatten(0, -2)[divergence.rows])):
        try:
            setattr(module, attribute, epsilon)
            outcome = replay(divergence.model, divergence.recording, point)
        finally:
            setattr(module, attribute, right)
        if epsilon != right and divergence.explains(outcome):
            return Cause(
                "norm epsilon",
                f"{divergence.name} adds {epsilon:g} to the mean square where the model adds "
                f"{right:g}.{_config(divergence)}",
                divergence.evidence(f"Epsilon {epsilon:g}, solved from input and output,", outcome),
            )
    return None


def _samples(divergence: Divergence) -> int:
    return len(divergence.recording.calls[divergence.point.module]) if divergence.point else 0


def _solve(divergence: Divergence, module: Any, inputs: Tensor) -> float:
    """The epsilon that takes `inputs` (rows, W) to what mcore computed."""
    weight = module.weight.detach()
    width = len(weight)
    x = inputs.reshape(-1, width)
    y = divergence.actual.reshape(-1, width)
    if isinstance(module, torch.nn.LayerNorm):
        x, y = x - x.mean(1, keepdim=True), y - module.bias.detach()
    made = weight * x
    root = (made * made).sum(1) / (made * y).sum(1)  # sqrt(mean square + epsilon) of each row
    mean_square = x.square().mean(1)
    # A row's rounding counts in proportion to its mean square: small rows tell most.
    weighting = mean_square.reciprocal().square()
    return float(((root.square() - mean_square) * weighting).sum() / weighting.sum())


def _candidates(solved: float) -> list[float]:
    """Round numbers near what was solved, then the number itself."""
    if not solved > 0:
        return [0.0]
    digits = -math.floor(math.log10(solved))
    return list(dict.fromkeys([round(solved, digits), round(solved, digits + 1), solved]))


def _config(divergence: Divergence) -> str:
    if divergence.examined.rms_norm_eps == divergence.architecture.rms_norm_eps:
        return ""
    examined = divergence.examined.rms_norm_eps
    return f" The examined checkpoint's config gives rms_norm_eps as {examined:g}."
