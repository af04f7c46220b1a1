"""The loader: an endless, sharded, resumable stream of batches from data sets.

What it reads, and in which order, depends on its kind: :mod:`.loader_kinds` has four. Here are what
they share: the data workers, iteration and its errors, and energon's own state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from megatron.energon import WorkerConfig, get_savable_loader
from megatron.energon.savable_loader import SavableDatasetCheckpoint

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.encoding.balanced import BalancedTaskEncoder
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.loader_kinds import Wanted, choose_kind
from mcore_qwen3vl.data.loader_state import SHARDS, from_plain, to_plain
from mcore_qwen3vl.data.worker import start_worker
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.flops import ALL, Trained
from mcore_qwen3vl.runtime.lifetime import scratch_folder

_PREFETCHED = 2  # batches that a data worker keeps ready
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
        self._config = config
        balancing = {"dp_rank": dp_rank, "dp_size": dp_size, "trained": trained}
        encoder = _make_encoder(architecture, processor, config, sources, **balancing)
        workers = WorkerConfig(
            **self._place, seed_offset=seed, global_error_handler=encoder.guard.on_error
        )
        seed_of_order = seed if config.shuffle else None
        wanted = Wanted(sources, split, config, encoder, workers, seed_of_order, epochs)
        self._kind = choose_kind(wanted, batches)
        self._loader = get_savable_loader(
            self._kind.dataset,
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
        return {
            **self._place,
            "balance": self._config.balance,
            **self._kind.fields(),
            "loader": state,
        }

    def has_grown(self, state: Mapping[str, Any]) -> bool:
        """Return whether records were appended to the data sets since a state was saved."""
        return self._kind.has_grown(state)

    def count_remaining(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the samples, or packs, of all ranks after a state; None: there is no end.

        Args:
            state: of any rank, as :meth:`state_dict` returns it; None: the beginning.
        """
        return self._kind.count_remaining(state)

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
        if state.get("order", SHARDS) != self._kind.name:
            raise BadInput(
                "The data state was saved by an earlier version, or by a run with another setting "
                "of --packing or with other data: the order of samples differs. To start the data "
                "from the beginning, pass --load DIR --finetune, and another --save."
            )
        state, place = self._kind.fit(state), self._place
        saved = {name: state[name] for name in place}
        if saved != place:
            raise BadInput(
                f"The data state is that of rank {saved['rank']} of {saved['world_size']} with "
                f"{saved['num_workers']} workers, but this is rank {place['rank']} of "
                f"{place['world_size']} with {place['num_workers']}. Give the states of all ranks "
                "to mcore_qwen3vl.data.redistribute, which makes those of another number of ranks "
                "and says how many workers each needs."
            )
        self._kind.start_from(state)
        restored = from_plain(state["loader"])
        self._loader.restore_state_rank(restored)
        if restored is not None and place["num_workers"] > 0:
            self._restore_counters(restored.worker_states)

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
