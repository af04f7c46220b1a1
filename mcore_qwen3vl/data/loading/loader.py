"""From paths to an endless, sharded, resumable stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.metadataset import traverse_metadataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.processor_files import require
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.pairs import PairTaskEncoder
from mcore_qwen3vl.data.loading.index import ensure_index
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.loading.stand_in import origin
from mcore_qwen3vl.data.loading.state import from_plain, to_plain
from mcore_qwen3vl.data.loading.worker import start_worker
from mcore_qwen3vl.data.scores import References
from mcore_qwen3vl.errors import BadInput

# Energon reads this many samples in a row from one place when it shuffles.
_RUN_LENGTH = 100


def load_processor(checkpoint: str | Path) -> Any:
    """The HF processor (tokenizer, image and video processor, chat template) of a checkpoint.

    Raises:
        BadInput: the directory lacks one of its files; or transformers is older than 5.17, whose
            processors write and count videos otherwise.
    """
    from transformers import AutoProcessor, Qwen3VLVideoProcessor

    if not hasattr(Qwen3VLVideoProcessor, "get_num_of_video_patches"):
        raise BadInput(
            f"Data and prompts need transformers 5.17 or newer; {version('transformers')} is "
            "installed, which is enough for model, conversion, checks and VERL. Upgrade it."
        )
    require(Path(checkpoint))
    try:
        return AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
    # transformers raises OSError, ValueError, KeyError and more for files that are missing.
    except Exception as error:
        raise BadInput(
            f"{checkpoint} holds no usable processor: {' '.join(str(error).split())} Copy the "
            "tokenizer, the processor configs and chat_template.jinja from the model's repository."
        ) from error


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
    ) -> None:
        """
        Args:
            sources: data sets and their weights. JSONL files have no splits.
            architecture: the model's shape.
            processor: of :func:`load_processor`; its budgets are changed as `config` says.
            config: lengths, layout and policies.
            dp_rank, dp_size: place among the data-parallel ranks; each reads its own shard.
            num_workers: processes that prepare batches; 0 prepares them in this one.
            split: part of WebDatasets and metadatasets; folders that lack it are used whole.
            seed: of the shuffling.
            checkpoint_every_seconds: how often a worker notes its state. Resuming redoes and
                discards what it prepared since.

        Raises:
            BadInput: a data set is missing or empty, or leaves a worker of this rank without data.
        """
        self._place = {"rank": dp_rank, "world_size": dp_size, "num_workers": num_workers}
        encoder = _encoder(sources, architecture, processor, config)
        workers = WorkerConfig(
            rank=dp_rank,
            world_size=dp_size,
            num_workers=num_workers,
            seed_offset=seed,
            global_error_handler=encoder.guard.on_error,
        )
        sources = [replace(source, path=_indexed(source.path)) for source in sources]
        dataset = get_train_dataset(
            _energon_path(sources, split),
            split_part=_split_of(sources[0].path, split) if len(sources) == 1 else split,
            worker_config=workers,
            task_encoder=encoder,
            batch_size=None if config.packing else config.micro_batch_size,
            batch_drop_last=True,
            packing_buffer_size=config.packing_buffer if config.packing else None,
            shuffle_buffer_size=config.shuffle_buffer if config.shuffle else None,
            shuffle_over_epochs_multiplier=1 if config.shuffle else None,
            max_samples_per_sequence=_RUN_LENGTH if config.shuffle else None,
            **({} if config.shuffle else {"parallel_shard_iters": 1}),
        )
        dealt = [dataset.len_worker(worker) for worker in range(max(num_workers, 1))]
        encoder.guard.expect(dp_size * sum(dealt), max(dealt))
        if not all(dealt):
            named = ", ".join(str(origin(source.path)) for source in sources)
            raise BadInput(
                f"The data of {named} is fewer samples than the {dp_size} data-parallel "
                f"ranks with {max(num_workers, 1)} data workers each. Lower --num-workers or the "
                "data-parallel size, or add data."
            )
        self._loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=checkpoint_every_seconds,
            watchdog_timeout_seconds=None,
        )
        if num_workers > 0:
            self._loader.worker_init_fn = partial(start_worker, self._loader.worker_init_fn)
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

    def __del__(self) -> None:
        # The workers stop at once when their iterator goes by its reference count. Left to the
        # garbage collector, its queues go first, and each worker is waited for and then killed.
        if workers := getattr(getattr(self, "_loader", None), "_epoch_iterator", None):
            workers.close()

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's stream stands, as plain data; the next batch is the first after it."""
        return {**self._place, "loader": to_plain(self._loader.save_state_rank())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; before the first batch is asked for.

        Raises:
            BadInput: the state is another rank's, or of another number of ranks or workers.
        """
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
    sources: Sequence[Source], architecture: Architecture, processor: Any, config: DataConfig
) -> Qwen3VLTaskEncoder:
    """Of single sequences, or of pairs with the references that lie beside `sources`."""
    if not config.pairs:
        return Qwen3VLTaskEncoder(architecture, processor, config)
    beside = None
    if config.references:
        beside = {source.path.absolute(): References.beside(source.path) for source in sources}
    return PairTaskEncoder(architecture, processor, config, beside)


def _indexed(path: Path) -> Path:
    """What energon is to read for a data set; energon opens all splits of a metadataset.

    Raises:
        BadInput: see :func:`ensure_index`; or a metadataset names data that cannot be indexed where
            it is.
    """
    if path.suffix in (".yaml", ".yml"):
        for split in yaml.safe_load(path.read_text(encoding="utf-8")).get("splits", {}):
            for leaf in traverse_metadataset(path.absolute(), split_part=split):
                place = Path(str(leaf.path))
                if (found := ensure_index(place)) != place:
                    raise BadInput(
                        f"The folder of {place} cannot be written, so its index is in {found}, and "
                        f"{path} does not name that. Put {found} into {path.name}, or name the "
                        "data sets with their weights in --data-path."
                    )
    return ensure_index(path)


def _split_of(path: Path, split: str) -> str:
    """`split`, or `train` for a folder of tars that has no such part, as one indexed here."""
    parts = path / ".nv-meta" / "split.yaml"
    if not parts.exists():
        return split
    shards = yaml.safe_load(parts.read_text(encoding="utf-8"))["split_parts"]
    return split if shards.get(split) else "train"


def _energon_path(sources: Sequence[Source], split: str) -> Any:
    """One path, or a blend of several in energon's own terms."""
    if len(sources) == 1:
        return sources[0].path.absolute()
    blend = [
        {
            "path": str(source.path.absolute()),
            "weight": source.weight,
            "split_part": _split_of(source.path, split),
        }
        for source in sources
    ]
    return {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {split: {"blend": blend}},
    }


def _without_traceback(error: BadInput) -> str:
    """The message alone: one from a worker process arrives wrapped in that process's traceback."""
    return str(error).rsplit("BadInput: ", 1)[-1].strip()
