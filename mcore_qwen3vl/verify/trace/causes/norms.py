"""A norm with the right weight and a wrong result: its epsilon is solved from input and output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.recording import replay
from mcore_qwen3vl.verify.trace.result import Cause

EPSILON_NAMES = ("variance_epsilon", "eps")


def find_norm_cause(scene: Scene) -> Cause | None:
    """Another epsilon, or no norm at all."""
    place = scene.forward
    if place is None or place.side == "input":
        return None
    module: Any = scene.model.get_submodule(place.module)
    attribute = next((n for n in EPSILON_NAMES if hasattr(module, n)), None)
    if attribute is None:
        return None
    calls = scene.recording.calls[place.module]
    inputs = scene.recording.assemble(place, [args[0] for args, _, _ in calls][: _samples(scene)])
    if scene.explains(inputs):
        return Cause(
            "missing norm",
            f"{scene.name} passes its input on unchanged.",
            scene.evidence("The input", inputs),
        )
    right = float(getattr(module, attribute))
    for epsilon in _candidates(_solve(scene, module, inputs.flatten(0, -2)[scene.rows])):
        try:
            setattr(module, attribute, epsilon)
            outcome = replay(scene.model, scene.recording, place)
        finally:
            setattr(module, attribute, right)
        if epsilon != right and scene.explains(outcome):
            return Cause(
                "norm epsilon",
                f"{scene.name} adds {epsilon:g} to the mean square where the model adds "
                f"{right:g}.{_config(scene)}",
                scene.evidence(f"Epsilon {epsilon:g}, solved from input and output,", outcome),
            )
    return None


def _samples(scene: Scene) -> int:
    return len(scene.recording.calls[scene.place.module]) if scene.place else 0


def _solve(scene: Scene, module: Any, inputs: Tensor) -> float:
    """The epsilon that takes `inputs` (rows, W) to what mcore computed."""
    weight = module.weight.detach()
    width = len(weight)
    x = inputs.reshape(-1, width)
    y = scene.actual.reshape(-1, width)
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


def _config(scene: Scene) -> str:
    if scene.examined.rms_norm_eps == scene.truth.rms_norm_eps:
        return ""
    return (
        f" The examined checkpoint's config gives rms_norm_eps as {scene.examined.rms_norm_eps:g}."
    )
