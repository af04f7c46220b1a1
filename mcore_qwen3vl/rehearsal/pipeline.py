"""Imbalance of the pipeline and its bubble: modelled from FLOPs, which were counted.

A micro-batch is taken to last, on each stage, as long as its share of the FLOPs says. Under 1F1B
the slowest stage works without a break once the pipeline is full, so that an iteration of m
micro-batches takes (m - 1) times its time and once that of every stage; interleaving v virtual
stages divides what is not the slowest stage's by v (Narayanan et al., arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
        """For ``--json``."""
        return {"kind of numbers": "modelled", **asdict(self)}


def model_pipeline(flops: Sequence[float], micro_batches: int, virtual: int = 1) -> Pipeline:
    """Of stages whose FLOPs for a micro-batch are known.

    Args:
        flops: of every stage, in order.
        micro_batches: of an iteration.
        virtual: virtual stages of a rank.
    """
    slowest, mean = max(flops), sum(flops) / len(flops)
    duration = micro_batches * slowest + (sum(flops) - slowest) / virtual
    return Pipeline(list(flops), slowest / mean, 1 - micro_batches * mean / duration)
