"""The order of records that are read by their number: one endless sequence for all ranks.

A position in it is a function of the seed alone, so the number of ranks and of data workers changes
nothing: each takes its turn. Energon's own order cuts the data into a part for each worker, and
shuffles each part in a buffer that never ends, from which a record may come twice before another
comes once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from mcore_qwen3vl.data.loading.datasets import Part
from mcore_qwen3vl.errors import BadInput

_TURNS = 10_000  # draws of a blend by weights that are made at a time
_LANES = 4  # parts of a table that are read in turn


class Order:
    """The records of several data sets by their position.

    Every epoch has a new permutation. A permutation holds each record once, so that no record comes
    twice before all have come once. Data sets that have weights are drawn by them, and each has its
    own epochs.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        repeats: Sequence[float] | None = None,
        weights: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            repeats: how often each data set is read in an epoch; default: once.
            weights: in place of `repeats`, the data sets' shares of the records.
            seed: None: read each data set in its own order, and spread all of them evenly.
        """
        self._parts, self._seed, self._weights = parts, seed, weights
        often = repeats or [1.0] * len(parts)
        self._draws = np.array(
            [max(1, round(len(part) * n)) for part, n in zip(parts, often, strict=True)]
        )
        self._chunk = -1
        self._before = [np.zeros(len(parts), np.int64)]
        """Of a blend by weights: the draws of each data set before each chunk, as far as known."""
        self._turns = self._nth = np.zeros(0, np.int32)
        self._permutations: dict[int, tuple[int, Sequence[int]]] = {}

    @property
    def epoch(self) -> int | None:
        """The number of positions in an epoch; None if the data sets have weights."""
        return None if self._weights else int(self._draws.sum())

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return the number of the data set, and that of the record among its records, from 0."""
        part, draw = 0, position
        if len(self._parts) > 1:
            chunk, place = divmod(position, self.epoch or _TURNS)
            if chunk != self._chunk:
                self._enter(chunk)
            part = int(self._turns[place])
            before = self._before[chunk] if self._weights else chunk * self._draws
            draw = int(before[part] + self._nth[place])
        epoch, index = divmod(draw, len(self._parts[part]))
        return part, int(self._permutation(part, epoch)[index])

    def _enter(self, chunk: int) -> None:
        """Compute the turns of a chunk of positions: an epoch, or some draws by weight."""
        count = len(self._parts)
        if self._weights is None:
            self._turns = np.repeat(np.arange(count, dtype=np.int32), self._draws)
            if self._seed is None:
                places = [(np.arange(draws) + 0.5) / draws for draws in self._draws]
                self._turns = self._turns[np.argsort(np.concatenate(places), kind="stable")]
            else:
                self._random(chunk).shuffle(self._turns)
        else:
            # Packing goes back and forth between chunks when it resumes.
            for earlier in range(len(self._before) - 1, chunk):
                drawn = np.bincount(self._drawn(earlier), minlength=count)
                self._before.append(self._before[earlier] + drawn)
            self._turns = self._drawn(chunk)
        self._nth = np.zeros(len(self._turns), np.int32)
        for part in range(count):
            of_part = self._turns == part
            self._nth[of_part] = np.arange(of_part.sum())
        self._chunk = chunk

    def _drawn(self, chunk: int) -> np.ndarray:
        shares = np.array(self._weights) / sum(self._weights or ())
        return self._random(chunk).choice(len(shares), _TURNS, p=shares)

    def _random(self, *which: int) -> np.random.RandomState:
        """Return random numbers that stay the same in every version of numpy."""
        return np.random.RandomState([(self._seed or 0) % 2**32, *which])

    def _permutation(self, part: int, epoch: int) -> Sequence[int]:
        if self._seed is None:
            epoch = 0
        if self._permutations.get(part, (-1,))[0] != epoch:
            self._permutations[part] = epoch, self._permuted(part, epoch)
        return self._permutations[part][1]

    def _permuted(self, part: int, epoch: int) -> Any:
        source = self._parts[part]
        if self._seed is None:
            return range(len(source))
        random = self._random(part, epoch)
        if source.runs is None:  # kept in half the bytes, by each data worker of each rank
            return random.permutation(len(source)).astype(np.int32)
        # Rows of a table are decoded together, so some groups are read side by side, each from its
        # first row to its last, with each row moved by at most as many as are kept.
        rows = np.array([rows for rows, _ in source.runs])
        group = np.repeat(np.arange(len(rows)), rows)[source.first :][: len(source)]
        within = np.concatenate([np.arange(n) for n in rows])[source.first :][: len(source)]
        kept = np.array([kept for _, kept in source.runs])[group]
        window = random.permutation(len(rows)) // _LANES
        share = (within + kept * random.random_sample(len(group))) / (rows[group] + kept)
        return np.argsort(window[group] + share, kind="stable").astype(np.int32)


def order_of(
    datasets: Sequence[LoadedDataset],
    parts: Sequence[Part],
    blend_mode: DatasetBlendMode,
    seed: int | None,
) -> Order:
    """Return the order of what :func:`load_sources` has loaded."""
    if blend_mode == DatasetBlendMode.SAMPLE_REPETITIONS:
        return Order(parts, repeats=[dataset.repetitions or 1.0 for dataset in datasets], seed=seed)
    weights = [1.0 if dataset.weight is None else float(dataset.weight) for dataset in datasets]
    return Order(parts, weights=weights if len(parts) > 1 else None, seed=seed)


def length_of_epoch(order: Order) -> int:
    """Return the number of positions in an epoch; raise BadInput if the data sets have weights."""
    if order.epoch is None:
        raise BadInput(
            "--num-epochs with data sets that have weights: each has its own epochs. Name them in "
            "a mixture file with epochs in place of weights, or give --train-iters N."
        )
    return order.epoch


ABSENT = -1
"""In place of a position: that of a sample without data."""


@dataclass
class Block:
    """The records of a micro-batch; none, if there is nothing left to read."""

    records: list[tuple[int, int]]  # (data set, record), as in `Order`
    __restore_key__: tuple[Any, ...] = ()


class _Ordered(SavableDataset[Any]):
    """What energon asks of a data set that this module's classes all answer alike."""

    def reset_state_own(self) -> None:
        self._taken = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return 1  # only whether there are any matters

    def worker_has_samples(self) -> bool:
        return True

    def can_restore_sample(self) -> bool:
        return True

    def assert_can_restore(self) -> None:
        pass

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__}


class Blocks(_Ordered):
    """The records of each micro-batch of this rank and worker, which take turns.

    A record that cannot be used leaves its place empty, so that all ranks stay at the same place.
    """

    _savable_fields = ("_start", "_taken")

    def __init__(
        self,
        order: Order,
        rows: int,
        workers: WorkerConfig,
        *,
        end: int | None = None,
        period: int | None = None,
    ) -> None:
        """
        Args:
            rows: records of a micro-batch.
            end: number of positions that are read; the rest of the blocks is empty.
            period: number of positions after which the order begins again.
        """
        super().__init__(worker_config=workers)
        self._order, self._rows, self._end, self._period = order, rows, end, period
        self._start = 0
        self.reset_state_own()

    def start_at(self, position: int) -> None:
        """Begin at a position instead of the first."""
        self._start = position

    def __iter__(self) -> Iterator[Block]:
        workers = self.worker_config
        while True:
            turn = self._taken * max(workers.num_workers, 1) + workers.rank_worker_id()
            self._taken += 1
            yield self.restore_sample((turn * workers.world_size + workers.rank,))

    def restore_sample(self, restore_key: Any) -> Block:
        (number,) = restore_key
        first = self._start + number * self._rows
        if self._period is not None:
            first %= self._period
        last = first + self._rows
        if self._end is not None:
            last = min(last, self._end)
        return Block([self._order[place] for place in range(first, last)], restore_key)


class Stream(_Ordered):
    """Records one at a time: all of them, or this worker's part of them."""

    _savable_fields = ("_taken",)

    def __init__(
        self,
        order: Order,
        parts: Sequence[Part],
        workers: WorkerConfig,
        *,
        shared: bool,
        end: int | None = None,
    ) -> None:
        """
        Args:
            shared: whether each worker of each rank reads all records.
            end: number of positions that are read; after them come samples without data.
        """
        super().__init__(worker_config=workers)
        self._order, self._parts, self._shared, self._end = order, parts, shared, end
        self.reset_state_own()

    def __iter__(self) -> Iterator[RawSampleData]:
        count = max(self.worker_config.num_workers, 1)
        step, first = self.worker_config.world_size * count, self.worker_config.rank * count
        first += self.worker_config.rank_worker_id()
        if self._shared:
            step, first = 1, 0
        while True:
            self._taken += 1
            yield self.restore_sample((first + (self._taken - 1) * step,))

    def restore_sample(self, restore_key: Any) -> RawSampleData:
        (place,) = restore_key
        if place == ABSENT or (self._end is not None and place >= self._end):
            return RawSampleData(__restore_key__=restore_key, data=())
        part, number = self._order[place]
        raw = self._parts[part].raw(number)
        return RawSampleData(__restore_key__=restore_key, data=raw.data)

    def part_of(self, raw: RawSampleData) -> Part:
        """Return the data set of a sample; any one for a sample without data."""
        return self._parts[self._order[raw.__restore_key__[-1]][0] if raw.data else 0]

    def epoch_of(self, restore_key: Any) -> int:
        """Return a sample's epoch by its restore key, or by one that begins with others'."""
        place, epoch = restore_key[-1], self._order.epoch
        if epoch is None:
            return 0
        last = place if self._end is None else min(place, self._end)
        return int(last // epoch)


def position_after(worker_states: Sequence[Mapping[str, Any]], start: int, rows: int) -> int:
    """Return the position after what one rank's workers have taken, for another number of them.

    Args:
        worker_states: a loader's state as plain data; all ranks have taken as much.
        rows: records that all ranks together have in a micro-batch.
    """
    blocks = 0
    for worker in worker_states:
        state = _state_of(Blocks, worker)
        start = state["_start"] if state else start
        blocks += (state["_taken"] if state else 0) + worker.get("offset", 0)
    return start + blocks * rows


def _state_of(kind: type, plain: Any) -> Any:
    """Return the state of a data set of this class in plain data, at any depth, or None."""
    if isinstance(plain, dict):
        if plain.get("__class__") == kind.__name__:
            return plain
        plain = list(plain.values())
    if isinstance(plain, list):
        states = (_state_of(kind, value) for value in plain)
        return next((state for state in states if state is not None), None)
    return None
