"""Which samples share a pack, and which packs the ranks have at the same time, by work.

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

A checkpoint counts packs from the beginning of a run, and every rank divides the samples by itself:
another division of the same numbers is another order of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

Row = list[list[int]]
"""The packs that the ranks have at the same time: for each rank, the samples of its pack."""


@dataclass(frozen=True)
class Division:
    """The samples of a buffer, by their index, divided into rows of packs."""

    rows: list[Row]
    left: list[int]  # samples left for the next buffer


def divide(
    lengths: Sequence[int] | np.ndarray,
    works: Sequence[float] | np.ndarray,
    capacity: int,
    ranks: int,
    *,
    carried: int = 0,
    rows_per_step: int = 1,
) -> Division:
    """Pack a buffer of samples into rows of one pack a rank.

    Args:
        lengths: tokens of each sample, padding included.
        works: FLOPs of each sample, except those of its tokens' linear layers, which are equal for
            all packs.
        capacity: tokens of a pack; no sample is longer.
        carried: number of first samples that were left from the previous buffer.
        rows_per_step: rows of one optimizer step; every step gets rows of all amounts of work,
            sorted.
    """
    lengths, works = np.asarray(lengths, np.int64), np.asarray(works, np.float64)
    row_count = max(1, int(lengths.sum()) // (capacity * ranks))
    bins, left = _fill_packs(lengths, works, capacity, row_count * ranks, carried)
    of_samples = works.tolist()
    of_packs = [sum(of_samples[index] for index in items) for items in bins]
    order = sorted(range(len(bins)), key=lambda pack: -of_packs[pack])
    totals = [0.0] * ranks
    rows = []
    for start in range(0, len(order), ranks):
        row: Row = [[] for _ in range(ranks)]
        # The most expensive pack of a row goes to the rank with the least work so far.
        emptiest = sorted(range(ranks), key=totals.__getitem__)
        for rank, pack in zip(emptiest, order[start : start + ranks], strict=True):
            row[rank] = sorted(bins[pack])
            totals[rank] += of_packs[pack]
        rows.append(row)
    steps = -(-len(rows) // rows_per_step)
    return Division([row for step in range(steps) for row in rows[step::steps]], left)


def _fill_packs(
    lengths: np.ndarray, works: np.ndarray, capacity: int, count: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """Return samples in `count` packs, and those that find no room."""
    # Without any work, all shares of it are 0.
    share = sum(works.tolist()) / count or 1.0
    # Long samples need room as expensive ones need work: the larger share of a pack decides.
    weights = np.maximum(lengths / capacity, works / share)
    order = np.lexsort((-weights, np.arange(len(lengths)) >= carried))
    bins: list[list[int]] = [[] for _ in range(count)]
    left: list[int] = []
    packs = _OpenPacks(count, capacity)
    samples = zip(order.tolist(), lengths[order].tolist(), works[order].tolist(), strict=True)
    for index, length, work in samples:
        pack = packs.place(length, work)
        (left if pack is None else bins[pack]).append(index)
    return bins, sorted(left)


_Entry = tuple[float, int]  # the work of a pack, and its number
_NONE: _Entry = (float("inf"), -1)


class _OpenPacks:
    """Packs to place samples in: each sample goes to the pack with room that has the least work.

    To look through all packs for one with room takes the square of their number, and every data
    worker of every rank does it. Here packs are in one heap until one that would be next has no
    room. From then on it is in the heap of all packs with as much room, and a tree of these heaps
    finds the least work among packs with enough room in the logarithm of a pack's tokens.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._rooms = [capacity] * count
        self._unsorted: list[_Entry] = [(0.0, pack) for pack in range(count)]
        self._by_room: dict[int, list[_Entry]] = defaultdict(list)
        # A binary tree: node n has the nodes 2n and 2n+1 below it, and the leaf of a room is at
        # `_leaves` + room. Each node holds the least entry below it.
        self._leaves = 1 << capacity.bit_length()
        self._tree = [_NONE] * (2 * self._leaves)

    def place(self, length: int, work: float) -> int | None:
        """Place a sample, and return its pack; None if no pack has room for it."""
        rooms, unsorted = self._rooms, self._unsorted
        while unsorted and rooms[unsorted[0][1]] < length:
            self._sort_by_room(heappop(unsorted))
        least = self._least_with_room(length)
        if unsorted and unsorted[0] < least:
            total, pack = unsorted[0]
            rooms[pack] -= length
            heapreplace(unsorted, (total + work, pack))
        elif least is _NONE:
            return None
        else:
            total, pack = least
            heappop(self._by_room[rooms[pack]])
            self._update_tree(rooms[pack])
            rooms[pack] -= length
            self._sort_by_room((total + work, pack))
        return pack

    def _sort_by_room(self, entry: _Entry) -> None:
        """Put a pack among those with as much room."""
        room = self._rooms[entry[1]]
        heappush(self._by_room[room], entry)
        self._update_tree(room)

    def _update_tree(self, room: int) -> None:
        """Bring the tree up to date with the packs that have so much room."""
        tree, packs = self._tree, self._by_room[room]
        node, least = self._leaves + room, packs[0] if packs else _NONE
        while node and tree[node] != least:
            tree[node] = least
            if (neighbour := tree[node ^ 1]) < least:
                least = neighbour
            node >>= 1

    def _least_with_room(self, length: int) -> _Entry:
        """Return the pack with the least work that has so much room, of those sorted by it."""
        tree = self._tree
        least = tree[1]
        if least is _NONE or self._rooms[least[1]] >= length:
            return least
        node = self._leaves + length
        least = tree[node]
        while node > 1:
            # The neighbour on the right has more room.
            if node % 2 == 0 and (neighbour := tree[node + 1]) < least:
                least = neighbour
            node >>= 1
        return least
