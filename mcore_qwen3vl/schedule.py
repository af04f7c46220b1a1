"""Megatron's pipeline schedules, played through: when each rank works, if transfers take no time.

1F1B and its interleaved form (Narayanan et al., arXiv:2104.04473), in the order of mcore's
``forward_backward_pipelining_without_interleaving`` and ``..._with_interleaving``. A formula knows
equal stages alone; this knows what a long virtual stage keeps its neighbours waiting for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Durations:
    """What a virtual stage takes for one micro-batch, in any unit."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Work(NamedTuple):
    """A forward or backward of one micro-batch through one virtual stage of a rank."""

    forward: bool
    micro_batch: int
    chunk: int


def play(stages: Sequence[Sequence[Durations]], micro_batches: int, group: int = 0) -> float:
    """From the first forward to the last backward of an iteration.

    A rank works in a fixed order. A forward waits for that of the virtual stage before, on the
    rank before or, from chunk to chunk, on the last rank; a backward likewise the other way round.

    Args:
        stages: of each pipeline rank, its virtual stages in the order of the model.
        micro_batches: of an iteration.
        group: ``--microbatch-group-size-per-virtual-pipeline-stage``; default: as many as ranks.

    Returns:
        In the unit of `stages`.

    Raises:
        ValueError: the ranks wait for each other: a last group of fewer micro-batches than ranks.
    """
    ranks, chunks = len(stages), len(stages[0])
    group = group or ranks
    orders = [order_of_work(rank, ranks, chunks, micro_batches, group) for rank in range(ranks)]
    done: dict[tuple[bool, int, int], float] = {}  # forward?, micro-batch, virtual stage
    last = ranks * chunks - 1
    clock, position = [0.0] * ranks, [0] * ranks
    moved = True
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


def order_of_work(rank: int, ranks: int, chunks: int, micro_batches: int, group: int) -> list[Work]:
    """What a rank does: forwards, then a forward and a backward in turn, then backwards.

    Args:
        rank: of the pipeline.
        ranks: of it.
        chunks: virtual stages of a rank.
        micro_batches: of an iteration.
        group: as many go through a virtual stage before the rank turns to its next one.
    """
    table = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    forwards = [Work(True, micro_batch, chunk) for micro_batch, chunk in table]
    backwards = [Work(False, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    ahead = ranks - rank - 1
    if chunks > 1:
        ahead = min(2 * ahead + (chunks - 1) * group, len(table))
    ahead = min(ahead, len(table))
    steady = [
        work
        for pair in zip(forwards[ahead:], backwards[: len(table) - ahead], strict=True)
        for work in pair
    ]
    return [*forwards[:ahead], *steady, *backwards[len(table) - ahead :]]
