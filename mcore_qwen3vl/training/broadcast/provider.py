"""The data provider: loaders on the ranks that read, and a stream for each pipeline chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.training import get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import name_unused
from mcore_qwen3vl.converters.place import read_tracker
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.loading.datasets import CrudeSamples
from mcore_qwen3vl.data.loading.sources import Source, parse_sources
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.flops import ALL
from mcore_qwen3vl.model.inputs import length_multiple
from mcore_qwen3vl.training.arguments.command_line import COMMAND_LINE
from mcore_qwen3vl.training.arguments.run import DISTILL, KTO, LOSSES, ComputeSettings
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings
from mcore_qwen3vl.training.broadcast.batches import (
    SharedBatches,
    StageFeed,
    host_group,
    rank_reads,
    wait_for_measuring,
)
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.unused import Unused


def data_config(settings: Settings) -> DataConfig:
    """Derive from the flags how samples become batches, or raise BadInput for a bad length."""
    parallel, data, loss = settings.parallel, settings.data, settings.training.loss
    local, multiple = _token_multiple(settings.compute), _length_multiple(settings)
    if data.seq_length % multiple:
        quantized = f" (FP8 and FP4 need a multiple of {local} on each rank)"
        raise BadInput(
            f"--seq-length {data.seq_length} is not a multiple of {multiple}, as CP "
            f"{parallel.context_parallel_size} and TP {parallel.tensor_model_parallel_size} "
            f"require{quantized if local > 1 else ''}. Round it."
        )
    pairs, task = loss in LOSSES, settings.task
    reads_teacher = loss == DISTILL and not settings.distillation.teacher
    per_step = data.micro_batch_size * parallel.data_parallel_size
    return replace(
        data,
        # CP divides each packed sample; SP divides the pack.
        length_multiple=(
            length_multiple(parallel.context_parallel_size) if data.packing else multiple
        ),
        pairs=pairs,
        labelled=loss == KTO,
        similarities=task.task == "embedding" and task.contrastive.takes_scores,
        labels=settings.labels if task.task == "classify" else None,
        references=pairs and settings.reference == "file",
        teacher_temperature=settings.distillation.loss.temperature if reads_teacher else None,
        micro_batches=max(1, settings.loop.global_batch_size // per_step),
    )


def validation_config(settings: Settings) -> DataConfig:
    """Derive from the flags how the samples of a validation become batches.

    They are not packed, so that the first batches hold the same ones under every layout.
    """
    config = data_config(settings)
    return replace(
        config,
        packing=False,
        balance=False,
        micro_batch_size=settings.loop.eval_micro_batch_size,
        pad_to_longest=config.pad_to_longest or config.packing,
        length_multiple=_length_multiple(settings),
    )


def _length_multiple(settings: Settings) -> int:
    """Return what the length of a batch must be a multiple of."""
    parallel, local = settings.parallel, _token_multiple(settings.compute)
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    return length_multiple(cp, tp, parallel.sequence_parallel, local=local)


def _token_multiple(compute: ComputeSettings) -> int:
    """Return what a rank's token count must be a multiple of, for linear layers in FP8 or FP4."""
    if compute.fp8:
        return get_fp8_align_size(Fp8Recipe(compute.fp8_recipe))
    return get_fp4_align_size(Fp4Recipe(compute.fp4_recipe)) if compute.fp4 else 1


class DataProvider:
    """Megatron's ``train_valid_test_dataset_provider`` with an external, resumable loader."""

    is_distributed = True  # called on every rank

    def __init__(
        self,
        settings: Settings,
        architecture: Architecture,
        on_batch: Callable[[Batch], None],
    ) -> None:
        loop, sources = settings.loop, settings.sources
        self._settings = settings
        self._architecture = architecture
        self._on_batch = on_batch
        self._sources = parse_sources(loop.training_data, sources.preprocess, sources.train_on)
        self._ahead = ThreadPoolExecutor(1, "read ahead") if loop.num_workers > 0 else None
        self._streams: tuple[SharedBatches, SharedBatches | None] | None = None
        self._steps: int | None = None  # of --num-epochs
        self._validation_batches = 0
        self.train_loader: Loader | None = None
        """The loader of the training data; None on ranks that do not read."""
        self.trained = ALL
        """How much of the model trains, from which a pack's work is computed."""

    def __call__(
        self, sample_counts: Sequence[int], vp_stage: int | None = None
    ) -> tuple[Iterator[Batch], Iterator[Batch] | None, None]:
        """Return the streams of one virtual pipeline stage: training, validation, and no test."""
        if self._streams is None:
            self._streams = self._build()
        train, valid = self._streams
        chunk = vp_stage or 0
        return train.chunk(chunk), valid.chunk(chunk) if valid else None, None

    def _build(self) -> tuple[SharedBatches, SharedBatches | None]:
        settings, loop = self._settings, self._settings.loop
        args = get_args()  # Megatron has read where the run goes on
        shared_host_group = host_group()
        # Before any data are opened: making a group waits for all ranks, with a short timeout.
        feed = StageFeed.between_stages()
        valid_feed = StageFeed.between_stages() if loop.valid_data_path else None
        config = data_config(settings)
        self.train_loader = self.train_loader or self._training_loader(config)
        load = settings.checkpoints.load
        if self.train_loader and load and args.iteration and not args.finetune:
            dp = parallel_state.get_data_parallel_rank(), settings.parallel.data_parallel_size
            data_state.load(self.train_loader, load, args.iteration, *dp, self._sources)
        valid = None
        if loop.valid_data_path:
            loader = self._open_validation()
            valid = self._share(loader, shared_host_group, valid_feed)
        if config.balance or loop.valid_data_path:
            wait_for_measuring()
        if loop.valid_data_path:
            self._agree_on_length()
        return self._share(self.train_loader, shared_host_group, feed, self._on_batch), valid

    def _training_loader(self, config: DataConfig) -> Loader | None:
        epochs = self._settings.training.num_epochs
        return self._loader(self._sources, "train", config, epochs=epochs)

    def count_steps(self) -> int:
        """Return the number of steps of ``--num-epochs``; all ranks call this, with the model."""
        settings, kept = self._settings, [0]
        if dist.get_rank() == 0:
            kept[0] = self._steps_of_saved() or 0
            if not kept[0]:
                self.train_loader = self._training_loader(data_config(settings))
                length = self.train_loader.length if self.train_loader else 0
                kept[0] = -(-(length or 0) // settings.loop.global_batch_size)
        wait_for_measuring()
        dist.broadcast_object_list(kept, src=0)
        self._steps = kept[0]
        return self._steps

    def _steps_of_saved(self) -> int | None:
        """Return the steps of the run that is resumed, if it has as many epochs.

        Another number of ranks would pack the samples differently.
        """
        checkpoints, load = self._settings.checkpoints, self._settings.checkpoints.load
        iteration = checkpoints.ckpt_step or (load and read_tracker(Path(load)))
        if checkpoints.finetune or not load or not isinstance(iteration, int):
            return None
        saved = data_state.first_of(load, iteration)
        epochs, steps = (saved or {}).get(data_state.EPOCHS) or (None, None)
        return steps if epochs == self._settings.training.num_epochs else None

    def _open_validation(self) -> Loader | None:
        """Count a validation's global batches, and open its data, on a rank that reads."""
        settings, loop, parallel = self._settings, self._settings.loop, self._settings.parallel
        if not self._reads():
            return None
        paths, reading = loop.valid_data_path or (), settings.sources
        sources = parse_sources(paths, reading.preprocess, reading.train_on)
        records = len(CrudeSamples(sources, split="val", trust=settings.data.trust_data))
        all_batches = -(-records // loop.eval_global_batch_size)  # global batches of all records
        if loop.eval_iters > all_batches and parallel.rank == 0:
            why = f"the data have {all_batches}"
            name_unused([Unused(COMMAND_LINE, f"--eval-iters {loop.eval_iters}", why)])
        self._validation_batches = (
            all_batches if loop.eval_iters == WHOLE else min(loop.eval_iters, all_batches)
        )
        micro_batches = (
            loop.eval_global_batch_size // parallel.data_parallel_size // loop.eval_micro_batch_size
        )
        batches = max(1, self._validation_batches * micro_batches)
        return self._loader(sources, "val", validation_config(settings), batches=batches)

    def _agree_on_length(self) -> None:
        """Tell Megatron on all ranks how many batches a validation has, which some do not read."""
        shared = [self._validation_batches]
        dist.broadcast_object_list(shared, src=0)
        (get_args().eval_iters,) = shared

    def _share(
        self, loader: Loader | None, host_group: Any, feed: StageFeed | None, *on_batch: Any
    ) -> SharedBatches:
        return SharedBatches(
            loader,
            device=torch.device(torch.cuda.current_device()),
            group=parallel_state.get_tensor_and_context_parallel_group(),
            host_group=host_group,
            feed=feed,
            chunks=self._settings.parallel.virtual_pipeline_model_parallel_size or 1,
            on_batch=on_batch,
            ahead=self._ahead,
        )

    def _loader(
        self, sources: Sequence[Source], split: Any, config: DataConfig, **more: Any
    ) -> Loader | None:
        """Return the loader on a rank that reads; None on the others, which receive its batches."""
        if not self._reads():
            return None
        settings = self._settings
        return Loader(
            sources,
            self._architecture,
            load_processor(settings.model.folder),
            config,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            num_workers=settings.loop.num_workers,
            split=split,
            seed=settings.loop.seed,
            trained=self.trained,
            **more,
        )

    def _reads(self) -> bool:
        """Return whether this rank reads; see :func:`.batches.rank_reads`."""
        return rank_reads()

    def save_state(self, directory: str, iteration: int) -> None:
        """Save this data-parallel rank's position in the training data."""
        if self.train_loader:
            position = self._streams[0].position() if self._streams else None
            dp_rank = parallel_state.get_data_parallel_rank()
            data_state.save(
                self.train_loader,
                directory,
                iteration,
                dp_rank,
                self._sources,
                position,
                self._settings.loop.global_batch_size,
                (self._settings.training.num_epochs, self._steps),
            )

    def close(self) -> None:
        """Wait for the batch that is read ahead; all ranks must, before groups are destroyed."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True)
