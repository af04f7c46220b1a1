"""What a loader reads: shards of tars, records by their number, or packs of these.

A loader is of one of four kinds, and :func:`choose_kind` says which:

* :class:`Shards`: the data are tars, packed or not. Each worker reads shards of its own.
* :class:`Records`: other data, one record a row. All ranks share one order of the records. Every
  validation is of this kind, :class:`Validation`.
* :class:`OwnPacks`: other data, packed without balanced work. Each worker packs its share of that
  order.
* :class:`SharedPacks`: other data, with balanced work. All workers of all ranks form the same packs
  of that order, and take them in turn.

A kind makes energon's data set of batches, for :class:`.loader.Loader` to run. It also knows what a
state holds besides energon's own, and how much of the data remains after a state. Records may have
been appended since, and the epochs may be others: it says where a run then goes on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.console import print_unused
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.datasets import NumberedSamples, are_numbered, load_sources, unread_of
from mcore_qwen3vl.data.encoding.balanced import SharedPacking
from mcore_qwen3vl.data.loader_state import (
    OWN_PACKS,
    RECORDS,
    SHARDS,
    SHARED_PACKS,
    count_packs_taken,
    packing_in,
    position_reached,
    state_for_rank,
)
from mcore_qwen3vl.data.order import Blocks, Order, Stream, order_of, require_epochs, states_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import usable_cores

_PASSES = 20
"""How often a data worker that finds nothing to use reads about as much as its share of tars has;
by chance a shuffling buffer keeps back what is usable, with a probability of e^-20."""


@dataclass(frozen=True)
class Wanted:
    """What a loader is asked to read.

    Attributes:
        encoder: of the records; a :class:`.balanced.BalancedTaskEncoder` for balanced work.
        workers: this rank, and its data workers.
        seed: of the order of records that are read by number; None: the order of the data.
        epochs: number of epochs; after them only batches that count for nothing follow.
    """

    sources: Sequence[Source]
    split: str
    config: DataConfig
    encoder: Any
    workers: WorkerConfig
    seed: int | None
    epochs: int | None

    def load(self, **options: Any) -> tuple[list[LoadedDataset], DatasetBlendMode]:
        """Make energon's data sets, by :func:`.datasets.load_sources`."""
        trust = self.config.trust_data
        return load_sources(self.sources, split=self.split, trust=trust, **options)


def choose_kind(wanted: Wanted, batches: int | None) -> LoaderKind:
    """Open the data sets, and return the kind of loader that reads them.

    Args:
        batches: of a validation, the number of this rank's batches; None: training.

    Raises:
        BadInput: a data set is missing or empty, or cannot be read as it is wanted.
    """
    # Built as for a single worker: what each worker reads is decided by position.
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loaded, blend_mode = wanted.load(training=False, shuffle=False, workers=alone)
    if wanted.workers.rank == 0:
        print_unused(unread_of(wanted.sources, wanted.split))
    if batches is not None:
        return Validation(wanted, loaded, batches)
    if not are_numbered(loaded):
        return Shards(wanted, loaded)
    if wanted.config.balance:
        loaded = wanted.encoder.measure_data_sets(loaded, usable_cores())
    data_sets = _open_data_sets(wanted, loaded)
    if wanted.config.balance:
        wanted.encoder.require_usable()
    order = order_of(loaded, data_sets, blend_mode, wanted.seed)
    if not wanted.config.packing:
        return Records(wanted, order)
    packs = SharedPacks if wanted.config.balance else OwnPacks
    return packs(wanted, order, data_sets)


def _open_data_sets(wanted: Wanted, loaded: Sequence[LoadedDataset]) -> list[NumberedSamples]:
    """Open the data sets for the encoder, and tell its guard how many records they have."""
    encoder, workers = wanted.encoder, wanted.workers
    encoder.data_sets = data_sets = [NumberedSamples(one.dataset) for one in loaded]
    records, per_rank = sum(map(len, data_sets)), max(1, workers.num_workers)
    encoder.guard.expect_records(records, -(-records // (workers.world_size * per_rank)))
    return data_sets


class LoaderKind:
    """What all kinds share. Here the data have no end, and a state is energon's alone."""

    name: str
    """The kind in a state, of :mod:`.loader_state`."""
    dataset: Any
    """Energon's data set of the batches of this rank."""

    def __init__(self, wanted: Wanted) -> None:
        self._paths = [source.path for source in wanted.sources]
        self._config, self._encoder, self._workers = wanted.config, wanted.encoder, wanted.workers

    def fields(self) -> dict[str, Any]:
        """Return what a state holds besides energon's own and the place of its rank."""
        fields: dict[str, Any] = {"order": self.name, "rows": None, "start": 0, "first": 0}
        fields |= {"end": None, "packs": None}
        return fields | ({"measures": self._encoder.measures} if self._config.balance else {})

    def has_grown(self, state: Mapping[str, Any]) -> bool:
        """Return whether records are known to be appended to the data since a state was saved."""
        return False

    def count_remaining(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the samples, or packs, of all ranks after a state; None: there is no end.

        Args:
            state: of any rank; None: the beginning.
        """
        if state is not None:
            self._update(state)
        return None

    def fit(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state as one of this run's data and epochs; its rank is not compared.

        From here on, packs are formed as in the run that saved it.

        Raises:
            BadInput: which records have been read is not known, or a data set holds less than then.
        """
        return self._update(state)

    def start_from(self, state: Mapping[str, Any]) -> None:
        """Begin where a state of :meth:`fit` began; energon's own says what was read since."""

    def _update(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state as one of this run's data; form packs as in the run that saved it."""
        if self._config.balance and "measures" in state:
            self._encoder.form_packs_by(state["measures"])
        return dict(state)


class Shards(LoaderKind):
    """Tars: each worker of each rank reads shards of its own, in an order of energon's.

    With balanced work, each worker goes through the same shards on all ranks.
    """

    name = SHARDS

    def __init__(self, wanted: Wanted, as_one: Sequence[LoadedDataset]) -> None:
        """
        Args:
            as_one: the data sets, loaded for one worker, whose samples have numbers.
        """
        super().__init__(wanted)
        if wanted.epochs is not None:
            raise BadInput(
                f"--num-epochs: {self._paths[0]} is read shard by shard, and each data worker has "
                "epochs of its own. Give --train-iters N, or convert it to JSONL or Parquet."
            )
        config, encoder, workers = self._config, self._encoder, self._workers
        ranks = workers.world_size
        if config.balance:  # all ranks go through the same order of samples, each for its share
            workers = replace(workers, rank=0, world_size=1)
        loaded, blend_mode = wanted.load(training=True, shuffle=config.shuffle, workers=workers)
        if config.balance:
            loaded = encoder.measure_data_sets(loaded, usable_cores())
            encoder.require_usable()
        else:
            encoder.data_sets = [NumberedSamples(one.dataset) for one in as_one]
        buffer = config.buffer * (ranks if config.balance else 1)
        self.dataset = encoder.build_train_datasets(
            datasets=loaded,
            blend_mode=blend_mode,
            worker_config=workers,
            batch_size=None if config.packing else config.micro_batch_size,
            batch_drop_last=True,
            packing_buffer_size=buffer if config.packing else None,
            shuffle_buffer_size=config.shuffle_buffer if config.shuffle else None,
        )
        count = max(workers.num_workers, 1)
        dealt = [self.dataset.len_worker(worker) for worker in range(count)]
        patience = _PASSES * (max(dealt) + config.shuffle_buffer)
        if config.balance:  # all ranks meet every bad sample; each counts its share of them
            encoder.guard.expect_records(sum(dealt), max(dealt) // ranks, patience)
        else:
            encoder.guard.expect_records(ranks * sum(dealt), max(dealt), patience)
        if not all(dealt):
            named = ", ".join(str(path) for path in self._paths)
            raise BadInput(
                f"{named}: fewer samples than data workers ({ranks} data-parallel ranks x {count} "
                "workers). Lower --num-workers or the data-parallel size, or add data."
            )


class _InOneOrder(LoaderKind):
    """What the other kinds share: one order of all records, an :class:`.order.Order`.

    Here a state is refused if records were appended since.
    """

    def __init__(self, wanted: Wanted, order: Order) -> None:
        """Raise BadInput if there are epochs, and the order has none."""
        super().__init__(wanted)
        self._order, self._epochs = order, wanted.epochs
        self._end = self._position_after(self._epochs)  # None: there is no end

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"end": self._end, "history": self._order.history}

    def has_grown(self, state: Mapping[str, Any]) -> bool:
        history = state.get("history")
        return bool(history and self._order.restore(history))

    def _position_after(self, epochs: int | None) -> int | None:
        """Return the position after so many epochs; None: there is no end."""
        if epochs is None:
            return None
        require_epochs(self._order)
        return self._order.start_of_epoch(epochs)

    def _update(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with its end, and with what was appended since; form packs as before.

        The epoch in progress goes on with the records that it was drawn from.
        """
        epochs, _ = state.get("num_epochs") or (None, None)  # in place of the end, once
        state = {"end": self._position_after(epochs), **super()._update(state)}
        if not self.has_grown(state):
            return state
        return self._grow(state) | {"history": self._order.history}

    def _grow(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take up what was appended since a state was saved; return the state to go on from."""
        raise BadInput(
            f"{self._paths[0]} has more records than when the state of the data was saved, and "
            "samples that were read ahead wait to be packed. Give the data of the checkpoint."
        )


class Records(_InOneOrder):
    """Records that are read by number, one a row, in an order that all ranks share."""

    name = RECORDS

    def __init__(self, wanted: Wanted, order: Order, **ends: Any) -> None:
        """
        Args:
            ends: of the order's :class:`.order.Blocks`, in place of the end of the epochs.
        """
        super().__init__(wanted, order)
        self._start = 0  # the position at which the blocks began
        self._rows = self._config.micro_batch_size
        ends = {"end": self._end, **ends}
        self._blocks = Blocks(order, self._rows, self._workers, **ends)
        read = self._encoder.read_block
        self.dataset = MapDataset(
            self._blocks, read, stateless_map_fn=True, worker_config=self._workers
        )

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"rows": self._rows, "start": self._start}

    def count_remaining(self, state: Mapping[str, Any] | None) -> int | None:
        if state is not None:
            state = self._update(state)
        if self._end is None or state is None:
            return self._end
        return max(0, self._end - min(position_reached(state), state.get("end") or self._end))

    def fit(self, state: Mapping[str, Any]) -> dict[str, Any]:
        state, workers = super().fit(state), self._workers.num_workers
        if (
            state["rows"] != self._rows
            or state["num_workers"] != workers
            or position_reached(state) > (state.get("end") or math.inf)
        ):
            # The order of records depends on neither, and what came after the end was empty.
            state = state_for_rank(state, state["rank"], state["world_size"]) | {
                "num_workers": workers
            }
        return state

    def start_from(self, state: Mapping[str, Any]) -> None:
        self._start = state["start"]
        self._blocks.start_at(self._start)

    def _grow(self, state: dict[str, Any]) -> dict[str, Any]:
        position = position_reached(state)
        self._order.grow(min(position, state.get("end") or position))
        self._end = self._position_after(self._epochs)
        self._blocks.end_at(self._end)
        return state


class Validation(Records):
    """The first records of the data in their order, each once, and that again and again.

    Batches that count for nothing follow if there are fewer records. What is appended to the data
    is read at once, so that a state has no history.
    """

    def __init__(self, wanted: Wanted, loaded: Sequence[LoadedDataset], batches: int) -> None:
        data_sets = _open_data_sets(wanted, loaded)
        period = batches * wanted.config.micro_batch_size * wanted.workers.world_size
        end = min(period, sum(map(len, data_sets)))
        super().__init__(replace(wanted, epochs=None), Order(data_sets), end=end, period=period)

    def fields(self) -> dict[str, Any]:
        fields = super().fields()
        del fields["history"]
        return fields


class OwnPacks(_InOneOrder):
    """Packs without balanced work: each worker of each rank packs its share of the order."""

    name = OWN_PACKS

    def __init__(self, wanted: Wanted, order: Order, data_sets: Sequence[NumberedSamples]) -> None:
        super().__init__(wanted, order)
        if self._end is not None:
            raise BadInput(
                "--num-epochs with --packing needs --balance: otherwise nobody knows how many "
                "packs the samples will fill. Leave --packing out, or give --train-iters N."
            )
        stream = Stream(order, data_sets, self._workers, shared=False)
        self.dataset = self._encoder.build_packs(stream, self._config.buffer, self._workers)


class SharedPacks(_InOneOrder):
    """Packs of balanced work, which all workers of all ranks form alike and take in turn."""

    name = SHARED_PACKS

    def __init__(self, wanted: Wanted, order: Order, data_sets: Sequence[NumberedSamples]) -> None:
        super().__init__(wanted, order)
        self._buffer = self._config.buffer * self._workers.world_size
        self._stream = Stream(order, data_sets, self._workers, shared=True, end=self._end)
        self.dataset = self._encoder.build_packs(self._stream, self._buffer, self._workers)
        self._first = 0  # the position of the first record of the first pack
        self._start = 0  # packs from there on that were taken before these ranks took turns
        self._packs = self._count_packs(0, self._end)  # of all ranks, from `_first` to the end

    def fields(self) -> dict[str, Any]:
        return super().fields() | {
            "start": self._start,
            "first": self._first,
            "packs": self._packs,
        }

    def count_remaining(self, state: Mapping[str, Any] | None) -> int | None:
        if state is not None:
            state = self._update(state)
        if self._end is None:
            return None
        if state is None:
            return self._packs
        if self._has_ended(state):
            return self._count_packs(state["end"], self._end)
        packs = self._count_packs(state.get("first", 0), self._end, packing_in(state))
        assert packs is not None
        return max(0, packs - count_packs_taken(state))

    def fit(self, state: Mapping[str, Any]) -> dict[str, Any]:
        state = super().fit(state)
        if state.get("end") not in (None, self._end):
            state = self._forget_from(state, state["end"])
        return state

    def start_from(self, state: Mapping[str, Any]) -> None:
        self._start, self._first = state["start"], state.get("first", 0)
        self.dataset.start_at(self._start)
        self._stream.start_at(self._first)
        self._packs = state.get("packs") or self._count_packs(
            self._first, self._end, packing_in(state)
        )

    def _grow(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self._order.has_epochs:
            return super()._grow(state)
        next_epoch = self._order.start_of_epoch(self._epoch_of_next_pack(state))
        start = self._order.grow(state["end"] if self._has_ended(state) else next_epoch)
        self._end = self._position_after(self._epochs)
        self._stream.end_at(self._end)
        return self._forget_from(state, start) | {"end": self._end}

    def _count_packs(
        self, first: int, end: int | None, packing: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the packs of all ranks between two positions, from the first record of an epoch.

        Args:
            end: None: there is no end, and the result is None.
            packing: state of the packing that makes them; None: this loader's own.
        """
        if end is None:
            return None
        own = {"_size": self._buffer, "_width": self._workers.world_size}
        made = packing or own
        count: int = self._encoder.count_packs(
            self._order, range(first, end), made["_size"], made["_width"]
        )
        return count

    def _has_ended(self, state: Mapping[str, Any]) -> bool:
        """Return whether all packs of the epochs were taken that the run of a state had."""
        if state.get("end") is None:
            return False
        packs = state.get("packs")
        if packs is None:  # earlier versions kept none
            packs = self._count_packs(state.get("first", 0), state["end"], packing_in(state))
        return packs is not None and count_packs_taken(state) >= packs

    def _epoch_of_next_pack(self, state: Mapping[str, Any]) -> int:
        """Return the first epoch without a taken pack, in data that have not grown yet."""
        order, first, packing = self._order, state.get("first", 0), packing_in(state)
        taken, epoch = count_packs_taken(state), order.epoch_of(first)
        while taken > 0:
            here = max(first, order.start_of_epoch(epoch))
            epoch += 1
            taken -= self._count_packs(here, order.start_of_epoch(epoch), packing) or 0
        return epoch

    def _forget_from(self, state: dict[str, Any], position: int) -> dict[str, Any]:
        """Return a state without what was read ahead from a position on, an epoch's start.

        That was nothing, if it is the end of the run that saved the state, or other records.
        """
        first = state.get("first", 0)
        packs = self._count_packs(first, position, packing_in(state))
        assert packs is not None
        if count_packs_taken(state) >= packs:  # what follows are packs of nothing, or of none yet
            rest = self._count_packs(position, self._end)
            return {**state, "first": position, "start": 0, "packs": rest, "loader": None}
        state = copy.deepcopy(state)
        for worker in state["loader"]["worker_states"] if state["loader"] else []:
            for stream in states_of(Stream, worker):
                stream["_taken"] = min(stream["_taken"], position - first)
            for packing in states_of(SharedPacking, worker):
                kept = packing["_reading_buffer"]
                kept["_restore_keys"] = [k for k in kept["_restore_keys"] if k[-1] < position]
        packs = self._count_packs(first, self._end, packing_in(state))
        return {**state, "packs": packs}
