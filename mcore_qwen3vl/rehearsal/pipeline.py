"""The pipeline's imbalance and bubble, modelled from counted FLOPs.

A micro-batch is assumed to take time in proportion to its FLOPs in each virtual stage and
direction, and transfers to take none; :mod:`mcore_qwen3vl.schedule` then simulates the iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_qwen3vl.schedule import Durations, play


@dataclass(frozen=True)
class Pipeline:
    """The modelled pipeline.

    Attributes:
        flops: FLOPs of each stage for one micro-batch, recomputed work included.
        imbalance: FLOPs of the busiest stage over the mean.
        bubble: share of an iteration in which a rank waits, on average.
    """

    flops: list[float]
    imbalance: float
    bubble: float

    def to_dict(self) -> dict[str, Any]:
        """Return the modelled pipeline for ``--json``."""
        return {"kind of numbers": "modelled", **asdict(self)}


def model_pipeline(
    stages: Sequence[Sequence[Durations]], micro_batches: int, group: int = 0
) -> Pipeline:
    """Model the pipeline of stages whose FLOPs for a micro-batch are known.

    Args:
        stages: FLOPs of each pipeline rank's virtual stages, in order.
        micro_batches: micro-batches of an iteration.
        group: see :func:`mcore_qwen3vl.schedule.play`.
    """
    flops = [sum(chunk.both for chunk in chunks) for chunks in stages]
    mean = sum(flops) / len(flops)
    duration = play(stages, micro_batches, group)
    return Pipeline(flops, max(flops) / mean, 1 - micro_batches * mean / duration)
