"""The loader: an endless, sharded, resumable stream of batches from data sets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.energon import WorkerConfig, get_savable_loader
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.savable_loader import SavableDatasetCheckpoint
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import print_unused
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.datasets import NumberedSamples, are_numbered, load_sources, unread_of
from mcore_qwen3vl.data.encoding.balanced import BalancedTaskEncoder, SharedPacking
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.loader_state import (
    OWN_PACKS,
    PACKS,
    RECORDS,
    SHARDS,
    count_packs_taken,
    from_plain,
    packing_in,
    position_reached,
    state_for_rank,
    to_plain,
)
from mcore_qwen3vl.data.order import Blocks, Order, Stream, order_of, require_epochs, states_of
from mcore_qwen3vl.data.worker import start_worker
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import usable_cores
from mcore_qwen3vl.model.flops import ALL, Trained
from mcore_qwen3vl.runtime.lifetime import scratch_folder

_PREFETCHED = 2  # batches that a data worker keeps ready
_PASSES = 20
"""How often a data worker that finds nothing to use reads about as much as its share of tars has;
by chance a shuffling buffer keeps back what is usable, with a probability of e^-20."""
_BACK = 2  # batches that may have been read since the position of a state


Position = tuple[tuple[int, ...], int]
"""How many batches each data worker of a loader has delivered, and which worker is next."""


class Loader(Iterator[Batch]):
    """Endless batches for one data-parallel rank, whose state can be saved and restored.

    Every rank of one model replica (TP x CP x PP) builds it with the same data-parallel rank and
    gets the same batches.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 2,
        split: Literal["train", "val", "test"] = "train",
        seed: int = 0,
        checkpoint_every_seconds: float = 60.0,
        trained: Trained = ALL,
        batches: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """Open the data sets; for balanced work, measure their samples.

        Args:
            sources: data sets with their weights and how their records are read. JSON, JSONL and
                Parquet files have no splits.
            processor: processor from :func:`.processor.load_processor`; its budgets are set to
                those of `config`.
            num_workers: processes that prepare batches; 0: prepare them in this process. Sizes, for
                balanced work, are measured on all cores.
            checkpoint_every_seconds: seconds between the states that a worker notes. Resuming
                prepares again, and discards, the batches since the last one.
            batches: of a validation, the number of this rank's batches. The stream holds the first
                records in their order, each once, then batches that count for nothing, and begins
                again after so many. None: training.
            epochs: number of epochs; after them only batches that count for nothing follow.

        Raises:
            BadInput: a data set is missing or empty, or leaves a worker of this rank without data;
                or the processor is another model's.
        """
        self._place = {"rank": dp_rank, "world_size": dp_size, "num_workers": num_workers}
        self._paths = [source.path for source in sources]
        self._config, self._epochs = config, epochs
        self._kind, self._start = SHARDS, 0
        self._order: Order | None = None  # of records that are read by number
        self._end: int | None = None  # the position after the last of all `epochs`
        self._stream: Stream | None = None  # of the records that all ranks pack together
        self._buffer = 0  # samples among which these choose
        self._first = 0  # the position of the first record of the first pack
        self._packs: int | None = None  # of all ranks, from that record to the end
        self._turns: Any = None  # what takes the positions of an order in turn, if they are kept
        self._rows: int | None = None  # of a micro-batch, if its records are read by number
        balancing = {"dp_rank": dp_rank, "dp_size": dp_size, "trained": trained}
        self._encoder = _make_encoder(architecture, processor, config, sources, **balancing)
        self._workers = WorkerConfig(
            **self._place, seed_offset=seed, global_error_handler=self._encoder.guard.on_error
        )
        load = partial(load_sources, sources, split=split, trust=config.trust_data)
        # Built as for a single worker: what each worker reads is decided by position.
        alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
        loaded, blend_mode = load(training=False, shuffle=False, workers=alone)
        seed_of_order = seed if config.shuffle else None
        if dp_rank == 0:
            print_unused(unread_of(sources, split))
        if batches is not None:
            dataset = self._validation_batches(loaded, batches)
        elif are_numbered(loaded):
            dataset = self._numbered_batches(loaded, blend_mode, seed_of_order)
        else:
            dataset = self._tar_batches(load, loaded)
        self._loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=checkpoint_every_seconds,
            watchdog_timeout_seconds=None,
            prefetch_factor=_PREFETCHED,
            n_checkpoints=_PREFETCHED * max(num_workers, 1) + 1 + _BACK,
        )
        # torch draws a number for the data workers when they start, by default from the generator
        # that dropout uses: a validation, and a resume, would change the training.
        self._loader.generator = torch.Generator().manual_seed((seed or 0) % 2**63)
        if num_workers > 0:
            self._temporary = ExitStack()  # closes with this object, after its workers
            # The prefix is multiprocessing's, and short: a socket's path has at most 107 bytes.
            temporary = self._temporary.enter_context(scratch_folder("pymp-"))
            # Energon's own initialiser runs first, in `start_worker`.
            start = self._loader.worker_init_fn
            self._loader.worker_init_fn = partial(start_worker, start, temporary)
        self._iterator: Iterator[Batch] | None = None

    def _validation_batches(self, loaded: Sequence[LoadedDataset], batches: int) -> Any:
        """Make the batches of a validation, again and again."""
        data_sets = self._open_data_sets(loaded)
        period = batches * self._config.micro_batch_size * self._workers.world_size
        return self._block_batches(
            Order(data_sets), end=min(period, sum(map(len, data_sets))), period=period
        )

    def _numbered_batches(
        self, loaded: Sequence[LoadedDataset], blend_mode: DatasetBlendMode, seed: int | None
    ) -> Any:
        """Make endless batches of records that are read by their number."""
        config, encoder, workers = self._config, self._encoder, self._workers
        if config.balance:
            loaded = encoder.measure_data_sets(loaded, usable_cores())
        data_sets = self._open_data_sets(loaded)
        if config.balance:
            encoder.require_usable()
        self._order = order = order_of(loaded, data_sets, blend_mode, seed)
        self._end = end = self._position_after_epochs(self._epochs)
        if not config.packing:
            return self._block_batches(order, end=end)
        buffer = config.buffer * (workers.world_size if config.balance else 1)
        if end is not None and not config.balance:
            raise BadInput(
                "--num-epochs with --packing needs --balance: otherwise nobody knows how many "
                "packs the samples will fill. Leave --packing out, or give --train-iters N."
            )
        stream = Stream(order, data_sets, workers, shared=config.balance, end=end)
        packs = encoder.build_packs(stream, buffer, workers)
        self._kind = OWN_PACKS
        if config.balance:
            self._kind, self._turns = PACKS, packs
            self._stream, self._buffer = stream, buffer
            self._packs = self._count_packs(0, end)
        return packs

    def _position_after_epochs(self, epochs: int | None) -> int | None:
        """Return the position after so many epochs; None: there is no end."""
        if epochs is None or self._order is None:
            return None
        require_epochs(self._order)
        return self._order.start_of_epoch(epochs)

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
        own = {"_size": self._buffer, "_width": self._place["world_size"]}
        made = packing or own
        count: int = self._encoder.count_packs(
            self._order, range(first, end), made["_size"], made["_width"]
        )
        return count

    def count_remaining(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the samples, or packs, of all ranks after a state; None: there is no end.

        Args:
            state: of any rank, as :meth:`state_dict` returns it; None: the beginning.
        """
        if state is not None:
            state = self._grow(self._as_saved(state))
        if self._end is None:
            return None
        if state is None:
            return self._end if self._kind == RECORDS else self._packs
        if self._kind == RECORDS:
            return max(0, self._end - min(position_reached(state), state.get("end") or self._end))
        if self._has_ended(state):
            return self._count_packs(state["end"], self._end)
        packs = self._count_packs(state.get("first", 0), self._end, packing_in(state))
        assert packs is not None
        return max(0, packs - count_packs_taken(state))

    def _as_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the position of its end; earlier versions kept the epochs.

        From here on, packs are formed as in the run that saved it.
        """
        if self._config.balance and "measures" in state:
            self._encoder.form_packs_by(state["measures"])
        epochs, _ = state.get("num_epochs") or (None, None)
        return {"end": self._position_after_epochs(epochs), **state}

    def _has_ended(self, state: Mapping[str, Any]) -> bool:
        """Return whether all packs of the epochs were taken that the run of a state had."""
        if state.get("end") is None:
            return False
        packs = state.get("packs")
        if packs is None:  # earlier versions kept none
            packs = self._count_packs(state.get("first", 0), state["end"], packing_in(state))
        return packs is not None and count_packs_taken(state) >= packs

    def has_grown(self, state: Mapping[str, Any]) -> bool:
        """Return whether records were appended to the data sets since a state was saved."""
        history = state.get("history")
        return bool(history and self._order and self._order.restore(history))

    def _grow(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take up what was appended since a state was saved; return the state to go on from.

        The epoch in progress goes on with the records that it was drawn from.

        Raises:
            BadInput: which records have been read is not known, or a data set holds less than then.
        """
        if not self.has_grown(state):
            return state
        order = self._order
        assert order is not None
        if self._kind not in (RECORDS, PACKS) or (self._kind == PACKS and not order.has_epochs):
            raise BadInput(
                f"{self._paths[0]} has more records than when the state of the data was saved, and "
                "samples that were read ahead wait to be packed. Give the data of the checkpoint."
            )
        reader: Any
        if self._kind == RECORDS:
            reader = self._turns
            position = position_reached(state)
            order.grow(min(position, state.get("end") or position))
            self._end = self._position_after_epochs(self._epochs)
        else:
            reader = self._stream
            next_epoch = order.start_of_epoch(self._epoch_of_next_pack(state))
            start = order.grow(state["end"] if self._has_ended(state) else next_epoch)
            self._end = self._position_after_epochs(self._epochs)
            state = self._forget_from(state, start) | {"end": self._end}
        reader.end_at(self._end)
        return state | {"history": order.history}

    def _epoch_of_next_pack(self, state: Mapping[str, Any]) -> int:
        """Return the first epoch without a taken pack, in data that have not grown yet."""
        order, first, packing = self._order, state.get("first", 0), packing_in(state)
        assert order is not None
        taken, epoch = count_packs_taken(state), order.epoch_of(first)
        while taken > 0:
            here = max(first, order.start_of_epoch(epoch))
            epoch += 1
            taken -= self._count_packs(here, order.start_of_epoch(epoch), packing) or 0
        return epoch

    def _open_data_sets(self, loaded: Sequence[LoadedDataset]) -> list[NumberedSamples]:
        """Open the data sets for the encoder, and tell its guard how many records they have."""
        self._encoder.data_sets = data_sets = [NumberedSamples(one.dataset) for one in loaded]
        records, per_rank = sum(map(len, data_sets)), max(1, self._workers.num_workers)
        share = -(-records // (self._workers.world_size * per_rank))
        self._encoder.guard.expect_records(records, share)
        return data_sets

    def _block_batches(self, order: Order, **ends: Any) -> Any:
        """Make batches of an order's records, one a row; `ends` are those of :class:`Blocks`."""
        self._kind, self._rows = RECORDS, self._config.micro_batch_size
        self._turns = blocks = Blocks(order, self._rows, self._workers, **ends)
        read = self._encoder.read_block
        return MapDataset(blocks, read, stateless_map_fn=True, worker_config=self._workers)

    def _tar_batches(self, load: Callable[..., Any], as_one: Sequence[LoadedDataset]) -> Any:
        """Make endless batches of tars, of which each worker reads a share.

        Args:
            load: loads the data sets for a number of workers.
            as_one: the data sets, loaded for one worker, whose samples have numbers.
        """
        if self._epochs is not None:
            raise BadInput(
                f"--num-epochs: {self._paths[0]} is read shard by shard, and each data worker has "
                "epochs of its own. Give --train-iters N, or convert it to JSONL or Parquet."
            )
        config, encoder, ranks = self._config, self._encoder, self._place["world_size"]
        workers = self._workers
        if config.balance:  # all ranks go through the same order of samples, each for its share
            workers = replace(workers, rank=0, world_size=1)
        loaded, blend_mode = load(training=True, shuffle=config.shuffle, workers=workers)
        if config.balance:
            loaded = encoder.measure_data_sets(loaded, usable_cores())
            encoder.require_usable()
        else:
            encoder.data_sets = [NumberedSamples(dataset.dataset) for dataset in as_one]
        buffer = config.buffer * (ranks if config.balance else 1)
        dataset = encoder.build_train_datasets(
            datasets=loaded,
            blend_mode=blend_mode,
            worker_config=workers,
            batch_size=None if config.packing else config.micro_batch_size,
            batch_drop_last=True,
            packing_buffer_size=buffer if config.packing else None,
            shuffle_buffer_size=config.shuffle_buffer if config.shuffle else None,
        )
        dealt = [dataset.len_worker(worker) for worker in range(max(workers.num_workers, 1))]
        patience = _PASSES * (max(dealt) + config.shuffle_buffer)
        if config.balance:  # all ranks meet every bad sample; each counts its share of them
            encoder.guard.expect_records(sum(dealt), max(dealt) // ranks, patience)
        else:
            encoder.guard.expect_records(ranks * sum(dealt), max(dealt), patience)
        if not all(dealt):
            named = ", ".join(str(path) for path in self._paths)
            raise BadInput(
                f"{named}: fewer samples than data workers ({ranks} data-parallel ranks x "
                f"{max(workers.num_workers, 1)} workers). Lower --num-workers or the data-parallel "
                "size, or add data."
            )
        return dataset

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise BadInput if too many samples were bad, or a worker died."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except BadInput as error:
            # One from a worker arrives inside that process's traceback.
            raise BadInput(str(error).rsplit("BadInput: ", 1)[-1].strip()) from None
        except (RuntimeError, EOFError, OSError) as error:
            if not self._is_of_a_dead_worker(error):
                raise
            raise BadInput(
                f"A data worker died: {error or 'its connection is closed'}. If the machine ran "
                "out of memory, lower --num-workers or --packing-buffer; `mcore-qwen3vl data "
                "check`, which names each record that cannot be used, reads the same data in one "
                "process."
            ) from error

    def _is_of_a_dead_worker(self, error: Exception) -> bool:
        """Return whether a data worker's death caused `error`.

        Either torch noticed the death, or reading what the worker left behind failed first. An
        error that a living worker raises begins with "Caught ... in DataLoader worker" here.
        """
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker")
        return self._place["num_workers"] > 0 and not str(error).startswith("Caught ")

    def __del__(self) -> None:
        # The workers stop at once if their iterator is closed here. The garbage collector would
        # delete its queues first, and each worker would be waited for and then killed.
        if workers := getattr(getattr(self, "_loader", None), "_epoch_iterator", None):
            workers.close()

    def position(self) -> Position | None:
        """Return where this rank's stream is, at no cost; None without data workers.

        :meth:`state_dict` accepts it as long as no more than two batches have been read since.
        """
        if self._place["num_workers"] == 0:
            return None
        return tuple(self._loader._worker_sample_counters), self._loader._next_worker_id

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Return the state of this rank's stream as plain data; resuming gives the next batch.

        With a `position`, of one or two batches ago, resuming gives the batch after that.
        """
        # Energon saves a state at its counters, which stand at `position` meanwhile.
        energon = self._loader
        now = list(energon._worker_sample_counters), energon._next_worker_id
        if position is not None:
            energon._worker_sample_counters = list(position[0])
            energon._next_worker_id = position[1]
        try:
            state = to_plain(energon.save_state_rank())
        finally:
            energon._worker_sample_counters, energon._next_worker_id = now
        ordered = {"order": self._kind, "rows": self._rows, "start": self._start}
        ends: dict[str, Any] = {"first": self._first, "end": self._end, "packs": self._packs}
        ends |= {"measures": self._encoder.measures} if self._config.balance else {}
        ends |= {"history": self._order.history} if self._order else {}
        return {**self._place, "balance": self._config.balance, **ordered, **ends, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`; call it before the first batch is read.

        Raises:
            BadInput: the state belongs to another rank, to another number of ranks or workers, or
                to a run with another setting of `balance`.
        """
        if state.get("balance", False) != self._config.balance:
            was, now = "with", "without"
            remedy = "Pass --packing and --balance, and leave --no-balance out."
            if self._config.balance:
                was, now = now, was
                remedy = "Add --no-balance."
            raise BadInput(
                f"The data state was saved {was} --balance, and this run is {now} it: the order of "
                f"samples differs. {remedy}"
            )
        if state.get("order", SHARDS) != self._kind:
            raise BadInput(
                "The data state was saved by an earlier version, or by a run with another setting "
                "of --packing or with other data: the order of samples differs. To start the data "
                "from the beginning, pass --load DIR --finetune, and another --save."
            )
        workers = self._place["num_workers"]
        state = self._grow(self._as_saved(state))
        if self._kind == RECORDS and (
            state["rows"] != self._rows
            or state["num_workers"] != workers
            or position_reached(state) > (state.get("end") or math.inf)
        ):
            # The order of records depends on neither, and what came after the end was empty.
            state = state_for_rank(state, state["rank"], state["world_size"]) | {
                "num_workers": workers
            }
        if self._kind == PACKS and state.get("end") not in (None, self._end):
            state = self._forget_from(state, state["end"])
        saved = {name: state[name] for name in self._place}
        if saved != self._place:
            raise BadInput(
                f"The data state is that of rank {saved['rank']} of {saved['world_size']} with "
                f"{saved['num_workers']} workers, but this is rank {self._place['rank']} of "
                f"{self._place['world_size']} with {workers}. Give the states of all ranks to "
                "mcore_qwen3vl.data.redistribute, which makes those of another number of ranks and "
                "says how many workers each needs."
            )
        if self._turns is not None:
            self._start = state["start"]
            self._turns.start_at(self._start)
        if self._stream is not None:
            self._first = state.get("first", 0)
            self._stream.start_at(self._first)
            self._packs = state.get("packs") or self._count_packs(
                self._first, self._end, packing_in(state)
            )
        restored = from_plain(state["loader"])
        self._loader.restore_state_rank(restored)
        if restored is not None and workers > 0:
            self._restore_counters(restored.worker_states)

    def _forget_from(self, state: dict[str, Any], position: int) -> dict[str, Any]:
        """Return a state of packs without what was read ahead from a position on, an epoch's start.

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

    def _restore_counters(self, worker_states: Sequence[SavableDatasetCheckpoint]) -> None:
        """Set the number of the last batch of each worker, from 0; -1: it has delivered none.

        Energon restores it from the state that the worker noted and omits the batches since: a
        state saved before the worker's next batch would repeat them.
        """
        self._loader._worker_sample_counters = [
            # Batches up to the noted state, and since then; the last one's number is one less.
            (worker.state.sample_index if worker.state else 0) + worker.offset - 1
            for worker in worker_states
        ]


def _make_encoder(
    architecture: Architecture,
    processor: Any,
    config: DataConfig,
    sources: Sequence[Source],
    **balancing: Any,
) -> Any:
    """Make the encoder of records, whose packs are balanced or not."""
    if not config.balance:
        return Qwen3VLTaskEncoder(architecture, processor, config, sources)
    if config.records is not None:
        raise BadInput(
            "--balance supports neither preference losses (--loss dpo, simpo, orpo, kto) nor "
            "--task: leave it out."
        )
    return BalancedTaskEncoder(architecture, processor, config, sources, **balancing)
