"""The data provider: what flags say of batches, and the loaders that a run takes them of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import print_unused
from mcore_qwen3vl.data.config import DataConfig, Source, parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.data.sharing import (
    OwnFeed,
    SharedBatches,
    StageFeed,
    is_first_of_tp_cp_group,
    new_host_group,
    rank_reads,
)
from mcore_qwen3vl.data.sizes import PATIENCE
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.flops import ALL
from mcore_qwen3vl.model.inputs import length_multiple
from mcore_qwen3vl.settings.run import ComputeSettings
from mcore_qwen3vl.training.arguments.command_line import COMMAND_LINE
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.checkpoints.resume import resumed_step
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.unused.fields import Unused


def data_config(settings: Settings) -> DataConfig:
    """Derive from the flags how samples become batches, or raise BadInput for a bad length."""
    parallel, data, loss = settings.parallel, settings.data, settings.loss
    local, multiple = _token_multiple(settings.compute), _length_multiple(settings)
    if data.seq_length % multiple:
        quantized = f" (FP8 and FP4 need a multiple of {local} on each rank)"
        raise BadInput(
            f"--seq-length {data.seq_length} is not a multiple of {multiple}, as CP "
            f"{parallel.context_parallel_size} and TP {parallel.tensor_model_parallel_size} "
            f"require{quantized if local > 1 else ''}. Round it."
        )
    per_step = data.micro_batch_size * parallel.data_parallel_size
    return replace(
        data,
        # CP divides each packed sample; SP divides the pack.
        length_multiple=(
            length_multiple(parallel.context_parallel_size) if data.packing else multiple
        ),
        micro_batches=max(1, settings.loop.global_batch_size // per_step),
        sidecar=loss.sidecar(settings, settings.lora),
        **loss.reads(settings, settings.lora),
    )


def validation_config(settings: Settings) -> DataConfig:
    """Derive from the flags how the samples of a validation become batches."""
    config = data_config(settings)
    return replace(
        config,
        # Without packing, the first batches hold the same samples under every layout.
        packing=False,
        balance=False,
        micro_batch_size=settings.loop.eval_micro_batch_size,
        pad_to_longest=config.pad_to_longest or config.packing,
        length_multiple=_length_multiple(settings),
        counts_again=True,
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
        *,
        on_batch: Sequence[Callable[[Batch], None]] = (),
        on_validation_batch: Sequence[Callable[[Batch], None]] = (),
        reads_on_every_stage: bool = False,
    ) -> None:
        """
        Args:
            on_batch: functions that are called once with each batch of the training data, on the
                host, without pixels.
            on_validation_batch: the same for validation data.
            reads_on_every_stage: whether a later pipeline stage reads its batches itself, because
                there is no first stage that sends them.
        """
        loop, sources = settings.loop, settings.sources
        self._settings = settings
        self._architecture = architecture
        self._on_batch, self._on_validation_batch = on_batch, on_validation_batch
        self._reads_on_every_stage = reads_on_every_stage
        self._sources = parse_sources(loop.training_data, sources.reading)
        self._ahead = ThreadPoolExecutor(1, "read ahead") if loop.num_workers > 0 else None
        self._streams: tuple[SharedBatches, SharedBatches | None] | None = None
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
            self._streams = self._build_streams()
        train, valid = self._streams
        chunk = vp_stage or 0
        return train.chunk(chunk), valid.chunk(chunk) if valid else None, None

    def _build_streams(self) -> tuple[SharedBatches, SharedBatches | None]:
        """Open the training data, where a resumed run goes on, and the validation data."""
        from megatron.training import get_args  # scoring takes batches without Megatron's loop

        settings, loop = self._settings, self._settings.loop
        args = get_args()  # Megatron has read where the run goes on
        shared_host_group = new_host_group()
        # Before any data are opened: making a group waits for all ranks, with a short timeout.
        feed = StageFeed.between_stages()
        valid_feed = StageFeed.between_stages() if loop.valid_data_path else None
        config = data_config(settings)
        self.train_loader = self.train_loader or self._open_training_loader(config)
        load = settings.checkpoints.load
        goes_on = load and args.iteration and not (args.finetune or loop.skip_train)
        if self.train_loader and load and goes_on:
            dp = parallel_state.get_data_parallel_rank(), settings.parallel.data_parallel_size
            data_state.load(self.train_loader, load, args.iteration, *dp)
        valid = None
        if loop.valid_data_path:
            loader = self._open_validation()
            valid = self._share(loader, shared_host_group, valid_feed, self._on_validation_batch)
        if config.balance or loop.valid_data_path:
            wait_for_measuring()
        if loop.valid_data_path:
            batches = [self._validation_batches]  # which some ranks do not read
            dist.broadcast_object_list(batches, src=0)
            (args.eval_iters,) = batches
        return self._share(self.train_loader, shared_host_group, feed, self._on_batch), valid

    def _open_training_loader(self, config: DataConfig) -> Loader | None:
        epochs = self._settings.training.num_epochs
        return self._open_loader(self._sources, "train", config, epochs=epochs)

    def count_steps(self) -> int:
        """Return the number of steps of ``--num-epochs``; all ranks call this, with the model."""
        steps = [0]  # a list, because it is broadcast
        if dist.get_rank() == 0:
            steps[0] = self._steps_of_epochs()
        wait_for_measuring()
        dist.broadcast_object_list(steps, src=0)
        return steps[0]

    def _steps_of_epochs(self) -> int:
        """Return the steps of the whole run: the sum of those done and those that remain."""
        settings = self._settings
        load, batch = settings.checkpoints.load or "", settings.loop.global_batch_size
        fallback = settings.training.on_corrupt_checkpoint == "fallback"
        made = resumed_step(settings.checkpoints, fallback=fallback)
        state = None if made is None else data_state.first_state_of(load, made)
        saved = None if made is None else RunRecord.of_checkpoint(load, made)
        self.train_loader = self._open_training_loader(data_config(settings))
        assert self.train_loader is not None, "the first rank reads"
        with data_state.name_unsound(load, made or 0):
            grown = state is not None and self.train_loader.has_grown(state)
        epochs, length = settings.training.num_epochs, "length of the run"
        if saved and saved.value(length, "num_epochs") == epochs and not grown:
            steps = saved.value(length, "train_iters")
            # They stay, because another number of ranks would pack the samples differently.
            if steps and saved.value("batch", "global_batch_size") == batch:
                return int(steps)
        with data_state.name_unsound(load, made or 0):
            remaining = self.train_loader.count_remaining(state) or 0
        return ((made or 0) if state else 0) - (-remaining // batch)

    def _open_validation(self) -> Loader | None:
        """Count a validation's global batches, and open its data, on a rank that reads."""
        settings, loop, parallel = self._settings, self._settings.loop, self._settings.parallel
        if not self._reads():
            return None
        sources = parse_sources(loop.valid_data_path or (), settings.sources.reading)
        records = len(CrudeSamples(sources, split="val", trust=settings.data.trust_data))
        all_batches = -(-records // loop.eval_global_batch_size)  # global batches of all records
        if loop.eval_iters > all_batches and parallel.rank == 0:
            why = f"the data have {all_batches}"
            print_unused([Unused(COMMAND_LINE, f"--eval-iters {loop.eval_iters}", why)])
        self._validation_batches = (
            all_batches if loop.eval_iters == WHOLE else min(loop.eval_iters, all_batches)
        )
        micro_batches = (
            loop.eval_global_batch_size // parallel.data_parallel_size // loop.eval_micro_batch_size
        )
        batches = max(1, self._validation_batches * micro_batches)
        return self._open_loader(sources, "val", validation_config(settings), batches=batches)

    def _share(
        self,
        loader: Loader | None,
        host_group: Any,
        feed: StageFeed | None,
        on_batch: Sequence[Callable[[Batch], None]],
    ) -> SharedBatches:
        """Return the batches of `loader` for all ranks."""
        source: Loader | None = loader
        sent: StageFeed | OwnFeed | None = feed
        if self._reads_on_every_stage:
            later = parallel_state.get_pipeline_model_parallel_rank() > 0
            source, sent = (None, OwnFeed(loader)) if later and loader else (loader, None)
        return SharedBatches(
            source,
            device=torch.device(torch.cuda.current_device()),
            group=parallel_state.get_tensor_and_context_parallel_group(),
            host_group=host_group,
            feed=sent,
            chunks=self._settings.parallel.virtual_pipeline_model_parallel_size or 1,
            on_batch=on_batch,
            ahead=self._ahead,
        )

    def _open_loader(
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
        """Return whether this rank reads; see :func:`rank_reads`."""
        if not self._reads_on_every_stage:
            return rank_reads()
        if not is_first_of_tp_cp_group():
            rank = parallel_state.get_tensor_and_context_parallel_rank()
            raise BadInput(
                f"Rank {rank} of a TP x CP group is sent its batches, which the simulated GPU "
                "cannot do: choose the first rank of the group, which does the same work."
            )
        return True

    def save_state(self, directory: str, iteration: int) -> None:
        """Save this data-parallel rank's position in the training data."""
        if self.train_loader:
            position = self._streams[0].position() if self._streams else None
            dp_rank = parallel_state.get_data_parallel_rank()
            data_state.save(self.train_loader, directory, iteration, dp_rank, position)

    def close(self) -> None:
        """Wait for the batch that is read ahead; all ranks must, before groups are destroyed."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True)


def wait_for_measuring() -> None:
    """Wait for the ranks that read, with a long timeout: they may first measure all data."""
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)))
