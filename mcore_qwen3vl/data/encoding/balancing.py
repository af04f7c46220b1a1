"""Packs of equal work, and their division over data-parallel ranks and micro-batches.

All ranks of a run do one micro-batch after the other together, so each takes as long as its most
expensive pack: what counts is the most work in a *row*, the packs that the ranks have at the same
time, over the mean. Every rank computes the same rows from the same numbers and takes its column.

Packs: the most expensive sample first, each into the pack with the least work that has room for it
(longest processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969). What
finds no room waits for the next buffer, where it is placed first. Rows: packs sorted by work, so
that those side by side are nearly equal; rows are dealt out so that the ranks' totals are level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate


@dataclass(frozen=True)
class Measure:
    """What is known of a sample before it is read."""

    length: int  # tokens, padded as it will be
    work: float  # FLOPs beyond those of its tokens' linear layers, which a pack's padding costs too


@dataclass(frozen=True)
class Division:
    """Samples by their index in the buffer."""

    rows: list[list[list[int]]]  # of one pack a rank
    left: list[int]  # for the next buffer


def divide(
    samples: Sequence[Measure],
    capacity: int,
    ranks: int,
    *,
    carried: int = 0,
    rows_per_step: int = 1,
) -> Division:
    """Pack a buffer into rows of one pack a rank.

    Args:
        samples: of the buffer.
        capacity: tokens of a pack; no sample is longer.
        ranks: data-parallel ranks; there are at least as many samples.
        carried: so many of the first samples were left from the buffer before.
        rows_per_step: of one optimizer step; each step's rows are alike, and sorted.
    """
    tokens = sum(sample.length for sample in samples)
    row_count = max(1, tokens // (capacity * ranks))
    bins, left = _pack(samples, capacity, row_count * ranks, carried)
    works = [sum(samples[index].work for index in items) for items in bins]
    order = sorted(range(len(bins)), key=lambda one: -works[one])
    totals = [0.0] * ranks
    rows = []
    for start in range(0, len(order), ranks):
        row: list[list[int]] = [[] for _ in range(ranks)]
        # The most expensive pack of a row to the rank that had the least so far.
        emptiest = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, one in zip(emptiest, order[start : start + ranks], strict=True):
            row[rank] = sorted(bins[one])
            totals[rank] += works[one]
        rows.append(row)
    steps = -(-len(rows) // rows_per_step)
    return Division([row for step in range(steps) for row in rows[step::steps]], left)


def _pack(
    samples: Sequence[Measure], capacity: int, count: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """Samples in `count` packs, and those that find no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    least = [(0.0, one) for one in range(count)]  # a heap: packs by their work
    left = []
    share = sum(sample.work for sample in samples) / count or 1.0
    # Long samples need room as expensive ones need work: by what they take most of.
    weights = [max(sample.length / capacity, sample.work / share) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: (i >= carried, -weights[i]))
    shortest = list(accumulate((samples[i].length for i in reversed(order)), min))[::-1]
    for place, index in enumerate(order):
        length = samples[index].length
        passed = []
        while least and rooms[least[0][1]] < length:
            work, one = heappop(least)
            if rooms[one] >= shortest[place]:  # otherwise nothing fits into it any more
                passed.append((work, one))
        if least:
            work, one = heappop(least)
            bins[one].append(index)
            rooms[one] -= length
            heappush(least, (work + samples[index].work, one))
        else:
            left.append(index)
        for item in passed:
            heappush(least, item)
    return bins, sorted(left)
