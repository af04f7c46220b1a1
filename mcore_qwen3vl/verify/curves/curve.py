"""A training curve: loss and gradient norm, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.training.logs.progress import LOSSES


@dataclass(frozen=True)
class StepMetrics:
    """The loss before one step, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


def curve_of(log: list[dict[str, Any]]) -> list[StepMetrics]:
    """Return the curve of a run's log."""
    name = next(name for name in LOSSES if not log or name in log[0])
    return [StepMetrics(entry[name], entry["grad norm"]) for entry in log]


def worst_difference(ours: Sequence[StepMetrics], theirs: Sequence[StepMetrics]) -> StepMetrics:
    """Return the largest relative differences of loss and gradient norm over two curves."""
    if len(ours) != len(theirs):
        raise ValueError(f"curves of {len(ours)} and {len(theirs)} steps")
    pairs = list(zip(ours, theirs, strict=True))
    return StepMetrics(
        max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs),
        max(abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in pairs),
    )
