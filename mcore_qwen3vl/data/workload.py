"""How even the work of ranks is, with each way of packing that training has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.division import Row, divide
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.sizes import Size, uneven_works
from mcore_qwen3vl.model import flops


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
        self.extra = uneven_works(architecture, sizes).tolist()
        self.capacity = capacity
        self.linear = flops.language(architecture, capacity, 0)
        """FLOPs of a pack's linear layers, padding included."""

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
    lengths: Sequence[int],
    works: Sequence[float],
    capacity: int,
    ranks: int,
    buffer: int,
    rows_per_step: int,
) -> Iterator[Row]:
    """Pack with ``--balance``, `buffer` samples a rank at a time; omit a last, partial buffer."""
    every_length, every_work = np.asarray(lengths), np.asarray(works)
    waiting: list[int] = []
    place = 0
    while (end := place + ranks * buffer - len(waiting)) <= len(lengths):
        carried = len(waiting)
        waiting += range(place, end)
        place = end
        chosen = every_length[waiting], every_work[waiting]
        division = divide(*chosen, capacity, ranks, carried=carried, rows_per_step=rows_per_step)
        for row in division.rows:
            yield [[waiting[item] for item in pack] for pack in row]
        waiting = [waiting[item] for item in division.left]
