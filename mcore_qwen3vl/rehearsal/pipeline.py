"""Imbalance of the pipeline and its bubble: modelled from FLOPs, which were counted.

A micro-batch is taken to last, in each virtual stage, forward and backward, as long as its share of
the FLOPs says, and transfers to last no time; :mod:`mcore_qwen3vl.schedule` then plays the
iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_qwen3vl.schedule import Durations, play


@dataclass(frozen=True)
class Pipeline:
    """Modelled.

    Attributes:
        flops: of each stage for one micro-batch, recomputed work included.
        imbalance: of the busiest stage over the mean.
        bubble: share of an iteration in which a rank waits, on average.
    """

    flops: list[float]
    imbalance: float
    bubble: float

    def to_dict(self) -> dict[str, Any]:
        """The modelled pipeline for ``--json``."""
        return {"kind of numbers": "modelled", **asdict(self)}


def model_pipeline(
    stages: Sequence[Sequence[Durations]], micro_batches: int, group: int = 0
) -> Pipeline:
    """Model the pipeline of stages whose FLOPs for a micro-batch are known.

    Args:
        stages: FLOPs of each pipeline rank's virtual stages, in order.
        micro_batches: of an iteration.
        group: see :func:`mcore_qwen3vl.schedule.play`.
    """
    flops = [sum(chunk.both for chunk in chunks) for chunks in stages]
    mean = sum(flops) / len(flops)
    duration = play(stages, micro_batches, group)
    return Pipeline(flops, max(flops) / mean, 1 - micro_batches * mean / duration)
