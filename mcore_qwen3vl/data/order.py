"""The order of records that are read by their number, and what this rank and worker take of it.

All ranks share one endless order. A position in it is a function of the seed alone, so the number
of ranks and of data workers changes nothing: each takes its turn. Energon's own order cuts the data
into a share for each worker, and shuffles each in an endless buffer: a record may come twice
before another comes once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from mcore_qwen3vl.data.datasets import NumberedSamples
from mcore_qwen3vl.errors import BadInput

_TURNS = 10_000  # draws of a blend by weights that are made at a time
_LANES = 4  # groups of a table's rows that are read side by side


@dataclass(frozen=True)
class Extent:
    """How much of a data set an order was drawn from.

    Attributes:
        records: number of its records.
        runs: number of the runs of rows that are best read together; 0: any row alone.
    """

    records: int
    runs: int = 0


@dataclass(frozen=True)
class _Epochs:
    """Epochs of one length; the last of an order go on without end.

    Attributes:
        start: position of the first of them.
        number: of the first of them.
        draws: of each data set in one of them.
        before: draws of each data set before them.
    """

    start: int
    number: int
    draws: np.ndarray
    before: np.ndarray

    @cached_property  # each sample asks for it
    def length(self) -> int:
        return int(self.draws.sum())

    def locate(self, position: int) -> tuple[int, int]:
        """Return the number of the epoch of a position, and the place in it."""
        beyond, place = divmod(position - self.start, self.length)
        return self.number + beyond, place


@dataclass(frozen=True)
class _Passes:
    """Passes over one data set, each of which holds every record of `extent` once.

    Attributes:
        start: the first draw.
        number: of the first pass.
    """

    start: int
    number: int
    extent: Extent

    def locate(self, draw: int) -> tuple[int, int]:
        """Return the number of the pass of a draw, and the place in it."""
        beyond, place = divmod(draw - self.start, self.extent.records)
        return self.number + beyond, place


class Order:
    """The records of several data sets by their position.

    Every epoch has a new permutation. A permutation holds each record once, so that no record comes
    twice before all have come once. Data sets that have weights are drawn by them, and each has its
    own epochs.

    Records may be appended to a data set after a run began. The epoch in progress keeps the records
    that it was drawn from; later epochs have the new ones too.
    """

    def __init__(
        self,
        data_sets: Sequence[NumberedSamples],
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
        self._data_sets, self._seed, self._weights = data_sets, seed, weights
        self._repeats = repeats or [1.0] * len(data_sets)
        self._chunk = -1
        self._before = [np.zeros(len(data_sets), np.int64)]
        """Of a blend by weights: the draws of each data set before each chunk, as far as known."""
        self._turns = self._nth = np.zeros(0, np.int32)
        self._permutations: dict[int, tuple[int, Sequence[int]]] = {}
        self.extents = [Extent(len(samples), len(samples.runs or ())) for samples in data_sets]
        """How much each data set holds now."""
        self._restart([(0, self.extents)])

    @property
    def history(self) -> list[Any]:
        """How the data sets grew: ``[[position, [[records, runs] of each data set]], ...]``."""
        return [
            [start, [[extent.records, extent.runs] for extent in extents]]
            for start, extents in self._history
        ]

    def restore(self, history: Sequence[Any]) -> bool:
        """Go on with another run's `history`; return whether the data sets have grown since.

        Raises:
            BadInput: a data set holds less than it did.
        """
        self._restart([(start, [Extent(*each) for each in held]) for start, held in history])
        _, before = self._history[-1]
        for samples, was, now in zip(self._data_sets, before, self.extents, strict=True):
            if now.records < was.records:
                raise BadInput(
                    f"{samples.path} has {now.records:,} records and had {was.records:,} when the "
                    "state of the data was saved. Give the data of the checkpoint."
                )
        return before != self.extents

    def grow(self, position: int) -> int:
        """Take up what was appended, once the records before `position` have been read.

        Returns:
            The first position that has another record than before.
        """
        start = position
        if self._weights is None:
            epoch, place = self._epochs_at(position).locate(position)
            start = self.start_of_epoch(epoch + bool(place))
        kept = [(at, extents) for at, extents in self._history if at < start]
        self._restart([*kept, (start, self.extents)])
        return start

    @property
    def has_epochs(self) -> bool:
        """Whether all data sets have the same epochs: they have no weights."""
        return self._weights is None

    def epoch_of(self, position: int) -> int:
        """Return the number of a position's epoch, from 0; 0 if the data sets have weights."""
        return self._epochs_at(position).locate(position)[0] if self.has_epochs else 0

    def start_of_epoch(self, number: int) -> int:
        """Return the first position of an epoch of data sets without weights."""
        epochs = self._epochs_numbered(number)
        return epochs.start + (number - epochs.number) * epochs.length

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return the number of the data set, and that of the record among its records, from 0."""
        data_set, draw = 0, position
        if len(self._data_sets) > 1:
            if self._weights is None:
                epochs = self._epochs_at(position)
                chunk, place = epochs.locate(position)
            else:
                chunk, place = divmod(position, _TURNS)
            if chunk != self._chunk:
                self._enter_chunk(chunk)
            data_set = int(self._turns[place])
            draw = int(self._draws_before(chunk)[data_set] + self._nth[place])
        passes = self._passes_at(data_set, draw)
        number, index = passes.locate(draw)
        return data_set, int(self._permutation(data_set, number, passes.extent)[index])

    def _restart(self, history: Sequence[tuple[int, Sequence[Extent]]]) -> None:
        """Compute the epochs, and the passes over each data set, of a history of extents."""
        self._history = [(start, list(extents)) for start, extents in history]
        self._chunk, self._permutations = -1, {}
        self._epochs: list[_Epochs] = []
        self._passes: list[list[_Passes]] = [[] for _ in self._data_sets]
        for start, extents in self._history:
            number = self.epoch_of(start) if self._epochs else 0
            before = self._count_draws(start)
            pairs = zip(extents, self._repeats, strict=True)
            draws = np.array([max(1, round(extent.records * often)) for extent, often in pairs])
            self._epochs.append(_Epochs(start, number, draws, before))
            for data_set, (extent, drawn) in enumerate(zip(extents, before.tolist(), strict=True)):
                self._begin_passes(data_set, drawn, extent)

    def _begin_passes(self, data_set: int, drawn: int, extent: Extent) -> None:
        """Let passes over a data set have another extent once a pass that has begun is over."""
        if not self._passes[data_set]:
            self._passes[data_set] = [_Passes(0, 0, extent)]
            return
        current = self._passes_at(data_set, drawn)
        number, place = current.locate(drawn)
        number += bool(place)
        start = current.start + (number - current.number) * current.extent.records
        kept = [passes for passes in self._passes[data_set] if passes.start < start]
        self._passes[data_set] = [*kept, _Passes(start, number, extent)]

    def _epochs_at(self, position: int) -> _Epochs:
        found = (each for each in reversed(self._epochs) if each.start <= position)
        return next(found, self._epochs[0])  # that of ABSENT, which is before all

    def _epochs_numbered(self, number: int) -> _Epochs:
        return next(each for each in reversed(self._epochs) if each.number <= number)

    def _passes_at(self, data_set: int, draw: int) -> _Passes:
        return next(each for each in reversed(self._passes[data_set]) if each.start <= draw)

    def _count_draws(self, position: int) -> np.ndarray:
        """Return how often each data set was drawn before a position, that of an epoch's start."""
        count = len(self._data_sets)
        if not self._epochs:
            return np.zeros(count, np.int64)
        if count == 1:
            return np.array([position])
        if self._weights is None:
            return self._draws_before(self._epochs_at(position).locate(position)[0])
        chunk, place = divmod(position, _TURNS)
        self._enter_chunk(chunk)
        return self._before[chunk] + np.bincount(self._turns[:place], minlength=count)

    def _draws_before(self, chunk: int) -> np.ndarray:
        """Return the draws of each data set before an epoch, or before a chunk of a blend."""
        if self._weights is not None:
            return self._before[chunk]
        epochs = self._epochs_numbered(chunk)
        return epochs.before + (chunk - epochs.number) * epochs.draws

    def _enter_chunk(self, chunk: int) -> None:
        """Compute the turns of a chunk of positions: an epoch, or some draws by weight."""
        count = len(self._data_sets)
        if self._weights is None:
            draws = self._epochs_numbered(chunk).draws
            self._turns = np.repeat(np.arange(count, dtype=np.int32), draws)
            if self._seed is None:
                places = [(np.arange(drawn) + 0.5) / drawn for drawn in draws]
                self._turns = self._turns[np.argsort(np.concatenate(places), kind="stable")]
            else:
                self._random_state(chunk).shuffle(self._turns)
        else:
            # Packing goes back and forth between chunks when it resumes.
            # The draws of chunks that were skipped are made only to be counted.
            for earlier in range(len(self._before) - 1, chunk):
                drawn = np.bincount(self._draw_turns(earlier), minlength=count)
                self._before.append(self._before[earlier] + drawn)
            self._turns = self._draw_turns(chunk)
        self._nth = np.zeros(len(self._turns), np.int32)
        for data_set in range(count):
            turns = self._turns == data_set
            self._nth[turns] = np.arange(turns.sum())
        self._chunk = chunk

    def _draw_turns(self, chunk: int) -> np.ndarray:
        shares = np.array(self._weights) / sum(self._weights or ())
        return self._random_state(chunk).choice(len(shares), _TURNS, p=shares)

    def _random_state(self, *which: int) -> np.random.RandomState:
        """Return random numbers that stay the same in every version of numpy."""
        return np.random.RandomState([(self._seed or 0) % 2**32, *which])

    def _permutation(self, data_set: int, number: int, extent: Extent) -> Sequence[int]:
        """Return the order in which a pass reads a data set: its own without a seed."""
        if self._seed is None:
            return range(extent.records)
        # Only the last pass's is kept.
        if self._permutations.get(data_set, (-1,))[0] != number:
            self._permutations[data_set] = number, self._draw_permutation(data_set, number, extent)
        return self._permutations[data_set][1]

    def _draw_permutation(self, data_set: int, number: int, extent: Extent) -> Any:
        samples, count = self._data_sets[data_set], extent.records
        random = self._random_state(data_set, number)
        if not extent.runs:  # kept in half the bytes, by each data worker of each rank
            return random.permutation(count).astype(np.int32)
        # Rows of a table are decoded together, so some groups are read side by side, each from its
        # first row to its last, with each row moved by at most as many as are kept.
        assert samples.runs is not None, "a data set that has grown is no smaller"
        runs = samples.runs[: extent.runs]
        rows = np.array([rows for rows, _ in runs])
        group = np.repeat(np.arange(len(rows)), rows)[samples.first :][:count]
        within = np.concatenate([np.arange(n) for n in rows])[samples.first :][:count]
        kept = np.array([kept for _, kept in runs])[group]
        window = random.permutation(len(rows)) // _LANES
        share = (within + kept * random.random_sample(len(group))) / (rows[group] + kept)
        return np.argsort(window[group] + share, kind="stable").astype(np.int32)


def order_of(
    loaded: Sequence[LoadedDataset],
    data_sets: Sequence[NumberedSamples],
    blend_mode: DatasetBlendMode,
    seed: int | None,
) -> Order:
    """Return the order of what :func:`.datasets.load_sources` has loaded."""
    if blend_mode == DatasetBlendMode.SAMPLE_REPETITIONS:
        return Order(data_sets, repeats=[one.repetitions or 1.0 for one in loaded], seed=seed)
    weights = [1.0 if one.weight is None else float(one.weight) for one in loaded]
    return Order(data_sets, weights=weights if len(data_sets) > 1 else None, seed=seed)


def require_epochs(order: Order) -> None:
    """Raise BadInput if the data sets of an order have weights, and so no common epochs."""
    if not order.has_epochs:
        raise BadInput(
            "--num-epochs with data sets that have weights: each has its own epochs. Name them in "
            "a mixture file with epochs in place of weights, or give --train-iters N."
        )


ABSENT = -1
"""In place of a position: that of a sample without data."""


@dataclass
class Block:
    """The records of a micro-batch; none, if there is nothing left to read."""

    records: list[tuple[int, int]]  # (data set, record), as in `Order`
    __restore_key__: tuple[Any, ...] = ()


class _Ordered(SavableDataset[Any]):
    """What this module's data sets share: where they begin and end, and what energon asks of them.

    `end` is the number of positions that are read; None: there is no end.
    """

    _savable_fields = ("_start", "_taken")

    def __init__(self, workers: WorkerConfig, end: int | None) -> None:
        super().__init__(worker_config=workers)
        self._start, self._end = 0, end
        self.reset_state_own()

    def start_at(self, position: int) -> None:
        """Begin at a position instead of the first."""
        self._start = position

    def end_at(self, position: int | None) -> None:
        """End at another position; None: never."""
        self._end = position

    def reset_state_own(self) -> None:
        self._taken = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return 1  # abstract in energon, which reads it for len() alone; the order is endless

    def worker_has_samples(self) -> bool:
        return True

    def can_restore_sample(self) -> bool:
        return True

    def restore_state(self, state: Any) -> None:
        # Version 0.1.0 saved no start for packed records, which began with the first.
        super().restore_state({"_start": 0, **state})

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__}


class Blocks(_Ordered):
    """The records of each micro-batch of this rank and worker, which take turns.

    A record that cannot be used leaves its place empty, so that all ranks stay at the same place.
    """

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
        super().__init__(workers, end)
        self._order, self._rows, self._period = order, rows, period

    def __iter__(self) -> Iterator[Block]:
        workers = self.worker_config
        while True:
            turn = self._taken * max(workers.num_workers, 1) + workers.rank_worker_id()
            self._taken += 1  # before it is yielded, so that a state saved then includes it
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
    """Records one at a time: all of them, or this worker's share of them."""

    def __init__(
        self,
        order: Order,
        data_sets: Sequence[NumberedSamples],
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
        super().__init__(workers, end)
        self._order, self._data_sets, self._shared = order, data_sets, shared

    def __iter__(self) -> Iterator[RawSampleData]:
        count = max(self.worker_config.num_workers, 1)
        step, first = self.worker_config.world_size * count, self.worker_config.rank * count
        first += self.worker_config.rank_worker_id()
        if self._shared:
            step, first = 1, 0
        while True:
            self._taken += 1  # before it is yielded, so that a state saved then includes it
            yield self.restore_sample((self._start + first + (self._taken - 1) * step,))

    def restore_sample(self, restore_key: Any) -> RawSampleData:
        (place,) = restore_key
        if place == ABSENT or (self._end is not None and place >= self._end):
            return RawSampleData(__restore_key__=restore_key, data=())
        data_set, number = self._order[place]
        raw = self._data_sets[data_set].raw(number)
        return RawSampleData(__restore_key__=restore_key, data=raw.data)

    def samples_of(self, raw: RawSampleData) -> NumberedSamples:
        """Return the data set of a sample; any one for a sample without data."""
        return self._data_sets[self._order[raw.__restore_key__[-1]][0] if raw.data else 0]

    def epoch_of(self, restore_key: Any) -> int:
        """Return a sample's epoch by its restore key, or by one that begins with others'."""
        place = restore_key[-1]
        # All samples after the end are of the epoch after the last.
        return self._order.epoch_of(place if self._end is None else min(place, self._end))


def position_after(worker_states: Sequence[Mapping[str, Any]], start: int, rows: int) -> int:
    """Return the position after what one rank's workers have taken, for another number of them.

    Args:
        worker_states: a loader's state as plain data; all ranks have taken as much.
        rows: records that all ranks together have in a micro-batch.
    """
    blocks = 0
    for worker in worker_states:
        state = next(states_of(Blocks, worker), {})
        start = state.get("_start", start)
        blocks += state.get("_taken", 0) + worker.get("offset", 0)
    return start + blocks * rows


def states_of(kind: type, plain: Any) -> Iterator[dict[str, Any]]:
    """Yield the state of every data set of this class in plain data, at any depth."""
    if isinstance(plain, dict):
        if plain.get("__class__") == kind.__name__:
            yield plain
        plain = list(plain.values())
    for value in plain if isinstance(plain, list) else ():
        yield from states_of(kind, value)
