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

Energon packs epoch by epoch: no sample is packed before all of the epoch before it are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, batched
from typing import Any

import numpy as np
from megatron.energon.wrappers import PackingDataset
from megatron.energon.wrappers.base import get_sample_restore_key

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.model.flops import ALL, Trained

Row = list[list[int]]
"""The packs that the ranks have at the same time: for each rank, the samples of its pack."""


@dataclass(frozen=True)
class Size:
    """The sizes of a sample from which its work is computed."""

    tokens: int
    patches: int
    squared_frames: float  # sum of the squared patch counts of all frames


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
        insort(rooms, (room - length, index))
    return sorted(sorted(items) for items in bins)


@dataclass(frozen=True)
class Measure:
    """What is known about a sample before it is read."""

    length: int  # tokens, padding included
    work: float  # FLOPs except those of its tokens' linear layers, which are equal for all packs


@dataclass(frozen=True)
class Division:
    """The samples of a buffer, by their index, divided into rows of packs."""

    rows: list[Row]
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
    bins, left = _fill_packs(samples, capacity, row_count * ranks, carried)
    works = [sum(samples[index].work for index in items) for items in bins]
    order = sorted(range(len(bins)), key=lambda pack: -works[pack])
    totals = [0.0] * ranks
    rows = []
    for start in range(0, len(order), ranks):
        row: list[list[int]] = [[] for _ in range(ranks)]
        # The most expensive pack of a row goes to the rank with the least work so far.
        emptiest = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, pack in zip(emptiest, order[start : start + ranks], strict=True):
            row[rank] = sorted(bins[pack])
            totals[rank] += works[pack]
        rows.append(row)
    steps = -(-len(rows) // rows_per_step)
    return Division([row for step in range(steps) for row in rows[step::steps]], left)


def _fill_packs(
    samples: Sequence[Measure], capacity: int, count: int, carried: int
) -> tuple[list[list[int]], list[int]]:
    """Return samples in `count` packs, and those that find no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    least = [(0.0, pack) for pack in range(count)]  # a heap: packs by their work
    left = []
    # Without any work, all shares of it are 0.
    share = sum(sample.work for sample in samples) / count or 1.0
    # Long samples need room as expensive ones need work: the larger share of a pack decides.
    weights = [max(sample.length / capacity, sample.work / share) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: (i >= carried, -weights[i]))
    # The shortest sample from each place of the order on.
    shortest = list(accumulate((samples[i].length for i in reversed(order)), min))[::-1]
    for place, index in enumerate(order):
        length = samples[index].length
        passed = []
        while least and rooms[least[0][1]] < length:
            work, pack = heappop(least)
            if rooms[pack] >= shortest[place]:  # otherwise no other sample fits into it
                passed.append((work, pack))
        if least:
            work, pack = heappop(least)
            bins[pack].append(index)
            rooms[pack] -= length
            heappush(least, (work + samples[index].work, pack))
        else:
            left.append(index)
        for item in passed:
            heappush(least, item)
    return bins, sorted(left)


def uneven_work(architecture: Architecture, size: Size, trained: Trained = ALL) -> float:
    """Return the FLOPs of a sample, except those of its tokens' linear layers.

    Those cost the same in every pack, since every pack is padded to `seq_length`.
    """
    attention = flops.language(architecture, 0, float(size.tokens) ** 2, trained)
    return attention + flops.vision(architecture, size.patches, size.squared_frames, trained)


def pack_by_length(lengths: Sequence[int], capacity: int, ranks: int, buffer: int) -> Iterator[Row]:
    """Pack without ``--balance``: each rank packs its own part, buffer by buffer."""
    share = len(lengths) // ranks
    columns: list[list[list[int]]] = [[] for _ in range(ranks)]
    for rank, packs in enumerate(columns):
        for items in batched(range(rank * share, (rank + 1) * share), buffer):
            fit = best_fit([lengths[item] for item in items], capacity)
            packs += [[items[place] for place in pack] for pack in fit]
    for row in zip(*columns, strict=False):
        yield list(row)


def pack_by_work(
    measures: Sequence[Measure], capacity: int, ranks: int, buffer: int, rows_per_step: int
) -> Iterator[Row]:
    """Pack with ``--balance``, `buffer` samples a rank at a time; omit a last, partial buffer."""
    waiting: list[int] = []
    place = 0
    while (end := place + ranks * buffer - len(waiting)) <= len(measures):
        carried = len(waiting)
        waiting += range(place, end)
        place = end
        chosen = [measures[item] for item in waiting]
        division = divide(chosen, capacity, ranks, carried=carried, rows_per_step=rows_per_step)
        for row in division.rows:
            yield [[waiting[item] for item in pack] for pack in row]
        waiting = [waiting[item] for item in division.left]


@dataclass(frozen=True)
class Balance:
    """How even the work of the rows is."""

    micro_batch_step: float
    """Sum over rows of the most work of a pack, divided by the sum of the rows' means: the time
    that the ranks take together, relative to perfect balance."""
    worst_micro_batch_step: float
    optimizer_step: float
    """The same ratio for the ranks' totals over a step, which matters if ranks wait for one another
    only when they reduce gradients."""
    filled: float
    """Share of the packs that is not padding."""
    packs: list[float]
    """The work of each pack divided by the mean of all packs."""


class Workload:
    """Samples with the work that a model does for them."""

    def __init__(self, architecture: Architecture, sizes: Sequence[Size], capacity: int) -> None:
        self.lengths = [size.tokens for size in sizes]
        self.extra = [uneven_work(architecture, size) for size in sizes]
        self.capacity = capacity
        self.linear = flops.language(architecture, capacity, 0)
        """FLOPs of a pack's linear layers, padding included."""

    def measures(self) -> list[Measure]:
        return [Measure(*pair) for pair in zip(self.lengths, self.extra, strict=True)]

    def balance(self, rows: Sequence[Row], rows_per_step: int) -> Balance:
        """Return the balance of whole steps, or of all rows if they are fewer than a step's."""
        per_step = min(rows_per_step, len(rows))
        rows = rows[: len(rows) // per_step * per_step]
        work = np.array(
            [[self.linear + sum(self.extra[item] for item in pack) for pack in row] for row in rows]
        ).reshape(-1, per_step, len(rows[0]))  # (steps, rows, ranks)
        tokens = [sum(self.lengths[item] for item in pack) for row in rows for pack in row]
        totals = work.sum(1)
        return Balance(
            micro_batch_step=float(work.max(2).sum() / work.mean(2).sum()),
            worst_micro_batch_step=float((work.max(2) / work.mean(2)).max()),
            optimizer_step=float(totals.max(1).sum() / totals.mean(1).sum()),
            filled=float(np.mean(tokens)) / self.capacity,
            packs=(work / work.mean()).ravel().tolist(),
        )


_KEPT = (
    *("dataset", "buffer_size", "worker_config", "final_packer", "final_packer_stateless"),
    *("sample_encoder", "sample_encoder_stateless", "sample_encoder_failure_tolerance"),
    *("pre_packer_failure_tolerance", "final_packer_failure_tolerance"),
)
"""What it takes over from energon's own."""

EpochOf = Callable[[Any], int]
"""``(restore key) -> the sample's epoch``."""


class EpochPacking(PackingDataset):
    """A packing whose buffer holds one epoch, and at most the first sample of the next."""

    _savable_fields = (*PackingDataset._savable_fields, "buffer_size", "_size")

    def __init__(
        self,
        packing: PackingDataset,
        epoch_of: EpochOf,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
    ) -> None:
        """Replace energon's packing; each buffer of one epoch's samples goes to `pre_packer`."""
        self._epoch_of, self._pack_epoch = epoch_of, pre_packer
        self._size = packing.buffer_size  # of a full buffer
        kept = {name: getattr(packing, name) for name in _KEPT}
        super().__init__(pre_packer=self._pack_first_epoch, **kept)

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Read until the buffer is full or holds the first sample of the next epoch."""
        reading, packed = self._reading_buffer, self._pre_packing_buffer
        while not self._crosses_epochs(reading._restore_keys):
            if reading.len_worker() + packed.len_worker() >= self._size:
                break
            reading.append(next(source_iter))
        # Energon packs a buffer of this size only.
        self.buffer_size = max(1, reading.len_worker())
        return True

    def _crosses_epochs(self, keys: Sequence[Any]) -> bool:
        """Return whether the last of these samples is not of the first one's epoch."""
        return bool(keys) and self._epoch_of(keys[0]) != self._epoch_of(keys[-1])

    def _pack_first_epoch(self, samples: list[Any]) -> list[list[Any]]:
        """Pack the samples of one epoch; the first of the next goes back to the reading buffer."""
        keys = [get_sample_restore_key(sample) for sample in samples]
        count = len(samples) - self._crosses_epochs(keys)
        self._ended = count < len(samples)
        packs = self._pack_epoch(samples[:count])
        self._reading_buffer.extend(samples[count:])
        return packs
