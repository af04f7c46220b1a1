"""The data provider: loaders on the ranks that read, and a stream for each pipeline chunk."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size

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
from mcore_qwen3vl.training.arguments.defaults import WHOLE
from mcore_qwen3vl.training.arguments.losses import (
    DISTILL,
    KTO,
    LOSSES,
    distillation_of,
    reference_of,
)
from mcore_qwen3vl.training.arguments.settings import media_limits
from mcore_qwen3vl.training.arguments.tasks import contrastive_of, labels_of
from mcore_qwen3vl.training.broadcast import data_state
from mcore_qwen3vl.training.broadcast.batches import (
    SharedBatches,
    StageFeed,
    host_group,
    reads,
    wait_for_measuring,
)
from mcore_qwen3vl.unused import Unused


def data_config(args: argparse.Namespace) -> DataConfig:
    """Derive from the flags how samples become batches, or raise BadInput for a bad length."""
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    local, multiple = _tokens_of_a_product(args), _whole(args)
    if args.seq_length % multiple:
        quantized = f" (FP8 and FP4 need a multiple of {local} on each rank)"
        raise BadInput(
            f"--seq-length {args.seq_length} is not a multiple of {multiple}, as CP {cp} and "
            f"TP {tp} require{quantized if local > 1 else ''}. Round it."
        )
    flags = vars(args)
    settings = {f.name: flags[f.name] for f in fields(DataConfig) if f.name in flags}
    # CP divides each packed sample; SP divides the pack.
    settings["length_multiple"] = length_multiple(cp) if args.packing else multiple
    settings["pairs"], settings["labelled"] = args.loss in LOSSES, args.loss == KTO
    settings["similarities"] = args.task == "embedding" and contrastive_of(args).takes_scores
    settings["labels"] = labels_of(args) if args.task == "classify" else None
    if args.balance is None:
        grouped = settings["pairs"] or settings["labelled"] or args.task
        settings["balance"] = args.packing and not grouped
    settings["references"] = settings["pairs"] and reference_of(args) == "file"
    if args.loss == DISTILL and not args.teacher:
        settings["teacher_temperature"] = distillation_of(args).temperature
    per_step = args.micro_batch_size * args.data_parallel_size
    settings["micro_batches"] = max(1, args.global_batch_size // per_step)
    return DataConfig(**settings, media=media_limits(args))


def validation_config(args: argparse.Namespace) -> DataConfig:
    """Derive from the flags how the samples of a validation become batches.

    They are not packed, so that the first batches hold the same ones under every layout.
    """
    config = data_config(args)
    return replace(
        config,
        packing=False,
        balance=False,
        micro_batch_size=args.eval_micro_batch_size,
        pad_to_longest=config.pad_to_longest or config.packing,
        length_multiple=_whole(args),
    )


def _whole(args: argparse.Namespace) -> int:
    """Return what the length of a batch must be a multiple of."""
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    return length_multiple(cp, tp, args.sequence_parallel, local=_tokens_of_a_product(args))


def _tokens_of_a_product(args: argparse.Namespace) -> int:
    """Return what a rank's token count must be a multiple of, for linear layers in FP8 or FP4."""
    if args.fp8:
        return get_fp8_align_size(Fp8Recipe(args.fp8_recipe))
    return get_fp4_align_size(Fp4Recipe(args.fp4_recipe)) if args.fp4 else 1


class DataProvider:
    """Megatron's ``train_valid_test_dataset_provider`` with an external, resumable loader."""

    is_distributed = True  # called on every rank

    def __init__(
        self,
        args: argparse.Namespace,
        architecture: Architecture,
        on_batch: Callable[[Batch], None],
    ) -> None:
        self._args = args
        self._architecture = architecture
        self._on_batch = on_batch
        self._sources = parse_sources(
            args.train_data_path or args.data_path, args.preprocess, args.train_on
        )
        self._ahead = ThreadPoolExecutor(1, "read ahead") if args.num_workers > 0 else None
        self._streams: tuple[SharedBatches, SharedBatches | None] | None = None
        self._steps: int | None = None  # of --num-epochs
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
        args = self._args
        shared_host_group = host_group()
        # Before any data are opened: making a group waits for all ranks, with a short timeout.
        feed = StageFeed.between_stages()
        valid_feed = StageFeed.between_stages() if args.valid_data_path else None
        config = data_config(args)
        self.train_loader = self.train_loader or self._training_loader(config)
        if self.train_loader and args.iteration and not args.finetune:
            dp = parallel_state.get_data_parallel_rank(), args.data_parallel_size
            data_state.load(self.train_loader, args.load, args.iteration, *dp, self._sources)
        valid = None
        if args.valid_data_path:
            loader = self._validation_loader()
            valid = self._share(loader, shared_host_group, valid_feed)
        if config.balance or args.valid_data_path:
            wait_for_measuring()
        if args.valid_data_path:
            self._agree_on_length()
        return self._share(self.train_loader, shared_host_group, feed, self._on_batch), valid

    def _training_loader(self, config: DataConfig) -> Loader | None:
        return self._loader(self._sources, "train", config, epochs=self._args.num_epochs)

    def count_steps(self) -> int:
        """Return the number of steps of ``--num-epochs``; all ranks call this, with the model."""
        args, kept = self._args, [0]
        if dist.get_rank() == 0:
            kept[0] = self._steps_of_saved() or 0
            if not kept[0]:
                self.train_loader = self._training_loader(data_config(args))
                length = self.train_loader.length if self.train_loader else 0
                kept[0] = -(-(length or 0) // args.global_batch_size)
        wait_for_measuring()
        dist.broadcast_object_list(kept, src=0)
        self._steps = kept[0]
        return self._steps

    def _steps_of_saved(self) -> int | None:
        """Return the steps of the run that is resumed, if it has as many epochs.

        Another number of ranks would pack the samples differently.
        """
        args = self._args
        iteration = args.ckpt_step or (args.load and read_tracker(Path(args.load)))
        if args.finetune or not isinstance(iteration, int):
            return None
        saved = data_state.first_of(args.load, iteration)
        epochs, steps = (saved or {}).get(data_state.EPOCHS) or (None, None)
        return steps if epochs == args.num_epochs else None

    def _validation_loader(self) -> Loader | None:
        """Set the number of a validation's batches, and open its data on a rank that reads."""
        args = self._args
        if not self._reads():
            return None
        sources = parse_sources(args.valid_data_path, args.preprocess, args.train_on)
        records = len(CrudeSamples(sources, split="val", trust=args.trust_data))
        batches = -(-records // args.eval_global_batch_size)
        if args.eval_iters > batches and args.rank == 0:
            why = f"the data have {batches}"
            name_unused([Unused(COMMAND_LINE, f"--eval-iters {args.eval_iters}", why)])
        args.eval_iters = batches if args.eval_iters == WHOLE else min(args.eval_iters, batches)
        count = args.eval_global_batch_size // args.data_parallel_size // args.eval_micro_batch_size
        config = validation_config(args)
        return self._loader(sources, "val", config, batches=max(1, args.eval_iters * count))

    def _agree_on_length(self) -> None:
        """Tell the ranks that do not read how many batches a validation has."""
        shared = [self._args.eval_iters]
        dist.broadcast_object_list(shared, src=0)
        (self._args.eval_iters,) = shared

    def _share(
        self, loader: Loader | None, host_group: Any, feed: StageFeed | None, *on_batch: Any
    ) -> SharedBatches:
        return SharedBatches(
            loader,
            device=torch.device(torch.cuda.current_device()),
            group=parallel_state.get_tensor_and_context_parallel_group(),
            host_group=host_group,
            feed=feed,
            chunks=self._args.virtual_pipeline_model_parallel_size or 1,
            on_batch=on_batch,
            ahead=self._ahead,
        )

    def _loader(
        self, sources: Sequence[Source], split: Any, config: DataConfig, **more: Any
    ) -> Loader | None:
        """Return the loader on a rank that reads; None on the others, which receive its batches."""
        if not self._reads():
            return None
        args = self._args
        return Loader(
            sources,
            self._architecture,
            load_processor(args.hf_model),
            config,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            num_workers=args.num_workers,
            split=split,
            seed=args.seed,
            trained=self.trained,
            **more,
        )

    def _reads(self) -> bool:
        """Return whether this rank reads; see :func:`.batches.reads`."""
        return reads()

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
                self._args.global_batch_size,
                (self._args.num_epochs, self._steps),
            )

    def close(self) -> None:
        """Wait for the batch that is read ahead; all ranks must, before groups are destroyed."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True)
