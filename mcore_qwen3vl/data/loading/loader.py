"""From paths to an endless, sharded, resumable stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from megatron.energon import WorkerConfig, get_savable_loader
from packaging.version import Version

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.processor_files import require
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.balanced import BalancedTaskEncoder
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.pairs import PairTaskEncoder
from mcore_qwen3vl.data.loading.datasets import load_sources
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.loading.state import from_plain, to_plain
from mcore_qwen3vl.data.loading.worker import start_worker
from mcore_qwen3vl.data.scores import References
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import usable_cores
from mcore_qwen3vl.model.flops import ALL, Trained
from mcore_qwen3vl.runtime.lifetime import scratch_folder

OLDEST_TRANSFORMERS = "5.18"
_PREFETCHED = 2  # batches that a data worker keeps ready
_BACK = 2  # batches that a state may lie behind what was read


def load_processor(checkpoint: str | Path) -> Any:
    """The HF processor (tokenizer, image and video processor, chat template) of a checkpoint.

    Raises:
        BadInput: the directory lacks one of its files; or transformers is older than 5.18, whose
            processors write and count videos otherwise.
    """
    from transformers import AutoProcessor

    if Version(installed := version("transformers")) < Version(OLDEST_TRANSFORMERS):
        raise BadInput(
            f"Data and prompts need transformers {OLDEST_TRANSFORMERS} or newer; {installed} is "
            "installed, which is enough for model, conversion, checks and VERL. Upgrade it."
        )
    require(Path(checkpoint))
    try:
        processor = AutoProcessor.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
    # transformers raises OSError, ValueError, KeyError and more for files that are missing.
    except Exception as error:
        raise BadInput(
            f"{checkpoint} holds no usable processor: {' '.join(str(error).split())} Copy the "
            "tokenizer, the processor configs and chat_template.jinja from the model's repository."
        ) from error
    videos = processor.video_processor
    if getattr(videos, "cap_pixels_per_frame", False) is None:
        # Frames are as large as the budgets allow, and stay so where a later version caps them.
        videos.cap_pixels_per_frame = False
    return processor


@dataclass(frozen=True)
class Position:
    """Of a loader with data workers: batches that each has given, and whose turn it is."""

    counters: tuple[int, ...]
    next_worker: int


class Loader(Iterator[Batch]):
    """Endless batches of this data-parallel rank, whose state can be saved and restored.

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
    ) -> None:
        """
        Args:
            sources: data sets, their weights, and what is said of their records. JSON, JSONL and
                Parquet files have no splits.
            architecture: the model's shape.
            processor: of :func:`load_processor`; its budgets are changed as `config` says.
            config: lengths, layout and policies.
            dp_rank, dp_size: place among the data-parallel ranks; each reads its own shard.
            num_workers: processes that prepare batches; 0 prepares them in this one. Sizes, for
                balanced work, are measured on all cores.
            split: part of WebDatasets and metadatasets; folders that lack it are used whole.
            seed: of the shuffling.
            checkpoint_every_seconds: how often a worker notes its state. Resuming redoes and
                discards what it prepared since.
            trained: how much of the model trains, for balanced work.

        Raises:
            BadInput: a data set is missing or empty, or leaves a worker of this rank without data.
        """
        self._place = {"rank": dp_rank, "world_size": dp_size, "num_workers": num_workers}
        self._balanced = config.balance
        encoder = _encoder(
            sources,
            architecture,
            processor,
            config,
            dp_rank=dp_rank,
            dp_size=dp_size,
            num_workers=num_workers,
            trained=trained,
        )
        workers = WorkerConfig(
            # Balanced, all ranks go through one order of samples, and each takes its part.
            rank=0 if config.balance else dp_rank,
            world_size=1 if config.balance else dp_size,
            num_workers=num_workers,
            seed_offset=seed,
            global_error_handler=encoder.guard.on_error,
        )
        datasets, blend_mode = load_sources(
            sources,
            split=split,
            training=True,
            shuffle=config.shuffle,
            workers=workers,
            trust=config.trust_data,
        )
        if config.balance:
            datasets = encoder.measured(datasets, usable_cores())
        buffer = config.packing_buffer * (dp_size if config.balance else 1)
        dataset = encoder.build_train_datasets(
            datasets=datasets,
            blend_mode=blend_mode,
            worker_config=workers,
            batch_size=None if config.packing else config.micro_batch_size,
            batch_drop_last=True,
            packing_buffer_size=buffer if config.packing else None,
            shuffle_buffer_size=config.shuffle_buffer if config.shuffle else None,
        )
        dealt = [dataset.len_worker(worker) for worker in range(max(num_workers, 1))]
        if config.balance:  # each rank counts its share of what all meet
            encoder.guard.expect(sum(dealt), max(dealt) // dp_size)
        else:
            encoder.guard.expect(dp_size * sum(dealt), max(dealt))
        if not all(dealt):
            named = ", ".join(str(source.path) for source in sources)
            raise BadInput(
                f"{named}: fewer samples than data workers ({dp_size} data-parallel ranks x "
                f"{max(num_workers, 1)} workers). Lower --num-workers or the data-parallel "
                "size, or add data."
            )
        self._loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=checkpoint_every_seconds,
            watchdog_timeout_seconds=None,
            prefetch_factor=_PREFETCHED,
            n_checkpoints=_PREFETCHED * max(num_workers, 1) + 1 + _BACK,
        )
        if num_workers > 0:
            self._temporary = ExitStack()  # closes with this object, after its workers
            # As short as multiprocessing's own: the path of a socket has 107 bytes.
            temporary = self._temporary.enter_context(scratch_folder("pymp-"))
            start = self._loader.worker_init_fn
            self._loader.worker_init_fn = partial(start_worker, start, temporary)
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """
        Raises:
            BadInput: too many samples were bad.
        """
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except BadInput as error:
            raise BadInput(_without_traceback(error)) from None
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
        """Whether torch noticed the death, or reading what the worker had left failed before that.

        What a living worker raises, torch raises here with "Caught ... in DataLoader worker".
        """
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker")
        return self._place["num_workers"] > 0 and not str(error).startswith("Caught ")

    def __del__(self) -> None:
        # The workers stop at once when their iterator goes by its reference count. Left to the
        # garbage collector, its queues go first, and each worker is waited for and then killed.
        if workers := getattr(getattr(self, "_loader", None), "_epoch_iterator", None):
            workers.close()

    def position(self) -> Position | None:
        """Where this rank's stream stands, at no cost: for :meth:`state_dict`, so long as no more
        than two batches are read meanwhile. None without data workers."""
        if self._place["num_workers"] == 0:
            return None
        return Position(tuple(self._loader._worker_sample_counters), self._loader._next_worker_id)

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Where this rank's stream stands, as plain data; the next batch is the first after it.

        Args:
            position: where it stood a batch or two ago, to go on from there instead.
        """
        energon = self._loader
        now = list(energon._worker_sample_counters), energon._next_worker_id
        if position is not None:
            energon._worker_sample_counters = list(position.counters)
            energon._next_worker_id = position.next_worker
        try:
            state = to_plain(energon.save_state_rank())
        finally:
            energon._worker_sample_counters, energon._next_worker_id = now
        return {**self._place, "balance": self._balanced, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; before the first batch is asked for.

        Raises:
            BadInput: the state is another rank's, or of another number of ranks or workers.
        """
        if state.get("balance", False) != self._balanced:
            raise BadInput(
                "The data state was saved "
                f"{'without' if self._balanced else 'with'} --balance, and this run is "
                f"{'with' if self._balanced else 'without'} it: the order of samples differs. "
                + (
                    "Add --no-balance."
                    if self._balanced
                    else "Pass --packing and --balance, and leave --no-balance out."
                )
            )
        saved = {name: state[name] for name in self._place}
        if saved != self._place:
            raise BadInput(
                f"The data state is that of rank {saved['rank']} of {saved['world_size']} with "
                f"{saved['num_workers']} workers, but this is rank {self._place['rank']} of "
                f"{self._place['world_size']} with {self._place['num_workers']}. Set "
                f"--num-workers to {saved['num_workers']}, and redistribute the states of all "
                "ranks when the data-parallel size changes."
            )
        restored = from_plain(state["loader"])
        self._loader.restore_state_rank(restored)
        if restored is not None and self._place["num_workers"] > 0:
            # Energon counts a worker's batches from the state it noted, and forgets those it
            # emitted since: saving again before that worker's next batch would repeat them.
            self._loader._worker_sample_counters = [
                (worker.state.sample_index if worker.state else 0) + worker.offset - 1
                for worker in restored.worker_states
            ]


def _encoder(
    sources: Sequence[Source],
    architecture: Architecture,
    processor: Any,
    config: DataConfig,
    **balancing: Any,
) -> Any:
    """Of single sequences, balanced or not, or of pairs with what lies beside `sources`."""
    if config.pairs and config.balance:
        raise BadInput("--balance does not weigh preference pairs: leave it out with --loss dpo.")
    if config.balance:
        return BalancedTaskEncoder(architecture, processor, config, sources, **balancing)
    if not config.pairs:
        return Qwen3VLTaskEncoder(architecture, processor, config, sources)
    beside = [References.beside(source.path) for source in sources] if config.references else None
    return PairTaskEncoder(architecture, processor, config, sources, beside)


def _without_traceback(error: BadInput) -> str:
    """The message alone: one from a worker process arrives wrapped in that process's traceback."""
    return str(error).rsplit("BadInput: ", 1)[-1].strip()
