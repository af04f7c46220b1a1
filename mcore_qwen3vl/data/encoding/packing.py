"""The choice of samples that share a sequence: by length, or of equal work over all ranks.

With balanced work, all ranks of a run do each micro-batch together, so it takes as long as its most
expensive pack. A *row* is the packs that the ranks have at the same time: its balance is the most
work of a pack over the mean. Every rank computes the same rows from the same numbers and takes its
own column.

To form packs, samples are placed the largest first, by their share of a pack's tokens or of its
work, whichever is larger. Each goes into the pack with the least work that has room for it (longest
processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969). Samples that
find no room wait for the next buffer, where they are placed first.
To form rows, packs are sorted by work, so that those of a row are nearly equal; within a row they
are assigned so that the ranks' totals are even.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best-fit decreasing: the longest item first, each into the bin that it fills best.

    It needs at most 11/9 of the fewest bins possible, plus one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

    Returns:
        The items' indices, bin by bin. Items within a bin, and bins by their first item, are in the
        order of `lengths`, so that packing does not sort training by length.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            bins.append([item])
            room, index = capacity, len(bins) - 1
        else:
            room, index = rooms.pop(place)
            bins[index].append(item)
        left = (room - length, index)
        rooms.insert(bisect_left(rooms, left), left)
    return sorted(sorted(items) for items in bins)


@dataclass(frozen=True)
class Measure:
    """What is known about a sample before it is read."""

    length: int  # tokens, padding included
    work: float  # FLOPs except those of its tokens' linear layers, which are equal for all packs


@dataclass(frozen=True)
class Division:
    """The samples of a buffer, by their index, divided into rows of packs."""

    rows: list[list[list[int]]]  # each row has one pack for each rank
    left: list[int]  # samples left for the next buffer


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
        capacity: tokens of a pack; no sample is longer.
        carried: number of first samples that were left from the previous buffer.
        rows_per_step: rows of one optimizer step; every step gets rows of all amounts of work,
            sorted.
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
        # The most expensive pack of a row goes to the rank with the least work so far.
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
    """Return samples in `count` packs, and those that find no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    least = [(0.0, one) for one in range(count)]  # a heap: packs by their work
    left = []
    share = sum(sample.work for sample in samples) / count or 1.0
    # Long samples need room as expensive ones need work: the larger share of a pack decides.
    weights = [max(sample.length / capacity, sample.work / share) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: (i >= carried, -weights[i]))
    shortest = list(accumulate((samples[i].length for i in reversed(order)), min))[::-1]
    for place, index in enumerate(order):
        length = samples[index].length
        passed = []
        while least and rooms[least[0][1]] < length:
            work, one = heappop(least)
            if rooms[one] >= shortest[place]:  # otherwise no other sample fits into it
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
