"""A simulation of a pipeline: when each rank works, if transfers take no time.

The usual formula holds for equal stages only; the simulation has the time that ranks wait for a
long stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_qwen3vl.training.pipeline_order import order_of_work


@dataclass(frozen=True)
class Durations:
    """The time that a virtual stage takes for one micro-batch, in any unit."""

    forward: float
    backward: float


def simulate(stages: Sequence[Sequence[Durations]], micro_batches: int, group: int = 0) -> float:
    """Return the time from the first forward to the last backward of an iteration.

    A rank works in a fixed order. A forward waits for the forward of the previous virtual stage,
    which is on the previous rank or, between chunks, on the last one. A backward waits for the
    backward of the next virtual stage.

    Args:
        stages: the virtual stages of each pipeline rank, in the order of the model.
        micro_batches: number of micro-batches in an iteration.
        group: ``--microbatch-group-size-per-virtual-pipeline-stage``; default: the number of ranks.

    Returns:
        The time, in the unit of `stages`.

    Raises:
        ValueError: the ranks deadlock, because the last group has fewer micro-batches than there
            are ranks.
    """
    ranks, chunks = len(stages), len(stages[0])
    group = group or ranks
    orders = [order_of_work(rank, ranks, chunks, micro_batches, group) for rank in range(ranks)]
    done: dict[tuple[bool, int, int], float] = {}  # forward?, micro-batch, virtual stage
    last = ranks * chunks - 1
    clock, position = [0.0] * ranks, [0] * ranks
    moved = True
    # Each rank works until what it waits for is not done. A round without progress is the last.
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                forward, micro_batch, chunk = order[position[rank]]
                stage = chunk * ranks + rank
                before = stage - 1 if forward else stage + 1
                ready = done.get((forward, micro_batch, before)) if 0 <= before <= last else 0.0
                if ready is None:
                    break
                durations = stages[rank][chunk]
                takes = durations.forward if forward else durations.backward
                clock[rank] = max(clock[rank], ready) + takes
                done[forward, micro_batch, stage] = clock[rank]
                position[rank] += 1
                moved = True
    if any(at < len(order) for at, order in zip(position, orders, strict=True)):
        raise ValueError(f"{micro_batches} micro-batches in groups of {group} wait for each other")
    return max(clock)


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

    A micro-batch is assumed to take time in proportion to them, and transfers to take none.
    """
    flops = [sum(chunk.forward + chunk.backward for chunk in chunks) for chunks in stages]
    mean = sum(flops) / len(flops)
    duration = simulate(stages, micro_batches, group)
    return Pipeline(flops, max(flops) / mean, 1 - micro_batches * mean / duration)
