"""The data provider: loaders on the ranks that read, and their batches on all other ranks.

While the device works on one batch, a host thread reads the next, sends its small tensors to the
other ranks, and puts the pixels in pinned memory. The copies to the device and the broadcast of
pixels run on a stream of their own, beside the computation.

Only the first pipeline stage runs data workers, and later stages, which have no vision tower, get
its batches. A later stage with a reader of its own would decode images it does not need. A file
that only this stage cannot read would put its stream out of step with the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import print_unused
from mcore_qwen3vl.data.config import DataConfig, Source, parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.balanced import PATIENCE
from mcore_qwen3vl.data.encoding.batch import Batch, without_pixels
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.flops import ALL
from mcore_qwen3vl.model.inputs import PER_PATCH, VisualInputs, length_multiple
from mcore_qwen3vl.settings.run import ComputeSettings
from mcore_qwen3vl.training.arguments.command_line import COMMAND_LINE
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.checkpoints.resume import resumed_step
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.unused.fields import Unused

label_module(__file__, "batch")


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
        if not _is_first_of_tp_cp_group():
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


def rank_reads() -> bool:
    """Return whether this is the first rank of a first pipeline stage."""
    return _is_first_of_tp_cp_group() and parallel_state.get_pipeline_model_parallel_rank() == 0


def _is_first_of_tp_cp_group() -> bool:
    """Return whether this rank is the first of its TP x CP group."""
    return bool(parallel_state.get_tensor_and_context_parallel_rank() == 0)


def new_host_group() -> dist.ProcessGroup:
    """Create a gloo group of this rank's TP x CP group, for use by a thread."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    mine = _new_gloo_group(dist.get_process_group_ranks(group))
    assert mine is not None
    return mine


def wait_for_measuring() -> None:
    """Wait for the ranks that read, with a long timeout: they may first measure all data."""
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)))


def _new_gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a gloo group of `ranks`; all ranks call this, and one with none in it gets None."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(ranks))
    mine, _ = dist.new_subgroups_by_enumeration(
        [list(members) for members in sorted(set(everywhere)) if members], backend="gloo"
    )
    return mine


class StageFeed:
    """Messages from the first stage to all later ones, sent without blocking the first.

    A thread sends them: a blocking send would wait for stages that wait for its activations.
    Nothing else uses `group`, a gloo group of one rank of each pipeline stage, in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._sender: Thread | None = None

    @classmethod
    def between_stages(cls) -> StageFeed | None:
        """Connect the first ranks of all stages; all ranks call this.

        It returns None if there is one stage only, or this rank is not the first of its stage.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return None
        # Even a pipeline group that uses gloo is not reused: it carries activations, and batches
        # must not mix with them.
        mine = _new_gloo_group(
            dist.get_process_group_ranks(group) if _is_first_of_tp_cp_group() else []
        )
        return cls(mine) if mine else None

    @property
    def is_source(self) -> bool:
        """Whether this rank is on the first stage."""
        return self._group.rank() == 0

    def send(self, message: Any) -> None:
        """Queue a picklable message, which must not change any more, for every later stage."""
        if self._sender is None:
            self._sender = Thread(target=self._deliver, name="stage feed", daemon=True)
            self._sender.start()
        self._queue.put(message)

    def receive(self) -> Any:
        """Return the first stage's next message."""
        message = [None]
        dist.recv_object_list(message, group=self._group, group_src=0)
        return message[0]

    def _deliver(self) -> None:
        """Send queued messages for ever: the thread's function."""
        while True:
            message = self._queue.get()
            # A broadcast would wait for the last stage first. The last stage asks for its batch
            # only after the stage before it has sent activations, and that stage waits for this
            # message too.
            for stage in range(1, self._group.size()):
                dist.send_object_list([message], group=self._group, group_dst=stage)


class OwnFeed:
    """The messages of a first stage that does not run, made here from the same batches."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def receive(self) -> Batch:
        """Return the next batch, with shapes in place of the tensors with a patch axis."""
        batch = next(self._loader)
        return (
            batch if batch.visual is None else replace(batch, visual=without_pixels(batch.visual))
        )


@dataclass(frozen=True)
class _Prepared:
    """A batch on the host of one rank, or the error that stops the run."""

    light: Batch | BadInput  # without pixels
    pixels_follow: bool  # whether the device group broadcasts the pixels
    visual: VisualInputs | None  # with pixels, on the rank that read them


class SharedBatches:
    """Batches of one loader, for every rank of a TP x CP group and every chunk of a rank.

    The first rank of the group reads. It sends small tensors to the others from host to host, and
    tensors with a patch axis from device to device. Later pipeline stages get what the first stage
    read, through its first rank, with shapes in place of the tensors with a patch axis.
    """

    def __init__(
        self,
        loader: Iterator[Batch] | None,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        feed: StageFeed | OwnFeed | None = None,
        chunks: int = 1,
        on_batch: Sequence[Callable[[Batch], None]] = (),
        ahead: Executor | None = None,
    ) -> None:
        """
        Args:
            loader: the data loader, on the first rank of the first stage's group; None on others.
            host_group: the same ranks over gloo; with `ahead`, nothing else may use it.
            feed: connects the first ranks of all pipeline stages; None on other ranks, or if there
                is only one stage.
            chunks: number of virtual pipeline stages of this rank, each of which gets every batch.
            on_batch: functions that are called once with each batch, on the host, without pixels.
            ahead: one thread, which reads the next batch while this one is in use; several streams
                may share it. If None, batches are read on demand.
        """
        self._loader = loader
        self._device = device
        self._group = group
        self._host_group = host_group
        self._feed = feed
        self._on_batch = on_batch
        self._ahead = ahead
        self._upcoming: Future[_Prepared] | None = None
        self._position: Any = None
        self._copies: Any = None  # the stream, once there is a device
        self._waiting: list[deque[Batch]] = [deque() for _ in range(chunks)]

    def chunk(self, index: int) -> Iterator[Batch]:
        """Yield the batches of one virtual pipeline stage."""
        while True:
            if not self._waiting[index]:
                batch = self._next_batch()
                for queue in self._waiting:
                    queue.append(batch)
            yield self._waiting[index].popleft()

    def position(self) -> Any:
        """Return the loader's ``state_dict`` position before it read ahead; None if it did not."""
        if self._upcoming is None:
            return None
        self._upcoming.exception()  # waits until the thread has finished reading
        return self._position

    def _next_batch(self) -> Batch:
        """Return the next batch on the device, and begin to read the one that follows it."""
        if self._upcoming is not None:
            prepared = self._upcoming.result()
            self._upcoming = None
        else:
            prepared = (
                self._prepare_first_batch(self._ahead) if self._ahead else self._prepare_batch()
            )
        light = prepared.light
        if isinstance(light, BadInput):
            raise light
        if self._ahead is not None:
            # Taken before the thread reads on, because a checkpoint goes on after this batch.
            self._position = self._loader.position() if isinstance(self._loader, Loader) else None
            self._upcoming = self._ahead.submit(self._prepare_batch)
        for callback in self._on_batch:
            callback(light)
        with self._on_copy_stream():
            batch = self._move_to_device(prepared, light)
        return self._hand_over(batch)

    def _prepare_first_batch(self, ahead: Executor) -> _Prepared:
        """Prepare the first batch on the caller's thread, because it starts the loader's processes.

        A process forked by another thread tears down this thread's state when it starts. It hangs
        if that state has a PyAV converter, because the converter's own threads were not forked.
        """
        ahead.submit(int).result()  # other streams' messages go first, as on the other ranks
        return self._prepare_batch()

    def _prepare_batch(self) -> _Prepared:
        """Do the host's work for a batch; on every rank in the same order."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        read: Batch | BadInput | None = None
        visual = None
        if self._loader is not None:
            try:
                read = next(self._loader)
            except BadInput as error:  # stops the run, and so the other ranks need it too
                read = error
        elif self._feed is not None:
            read = self._feed.receive()
        if isinstance(read, Batch) and read.visual is not None and self._loader is not None:
            visual, read = read.visual, replace(read, visual=without_pixels(read.visual))
            if self._device.type == "cuda":
                visual = visual.pin_memory()  # does nothing if torch's loader has done so
        if isinstance(self._feed, StageFeed) and self._feed.is_source:
            self._feed.send(read)
        message = [(read, self._loader is not None)]
        if self._group.size() > 1:
            dist.broadcast_object_list(message, group=self._host_group, group_src=0)
        light: Any
        light, pixels_follow = message[0]
        if isinstance(light, Batch) and self._device.type == "cuda":
            # A batch from another rank is not pinned yet.
            light = light.map_tensors(Tensor.pin_memory)
        return _Prepared(light, pixels_follow, visual)

    def _move_to_device(self, prepared: _Prepared, light: Batch) -> Batch:
        """Copy the small tensors, and get the pixels of the rank that read them, if they follow."""
        batch = light.map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True))
        if light.visual is None or not prepared.pixels_follow:
            return batch
        patches: dict[str, Any] = {
            name: self._broadcast_patches(
                getattr(prepared.visual, name, None), getattr(light.visual, name)
            )
            for name in PER_PATCH
        }
        return replace(batch, visual=replace(light.visual, **patches))

    def _on_copy_stream(self) -> Any:
        """Return a context whose copies run beside the computation, where there is a GPU."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._copies is None:
            self._copies = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._copies)

    def _hand_over(self, batch: Batch) -> Batch:
        """Hand the batch to the compute stream, which starts on it when the copies are done."""
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for tensor in batch.device_tensors():
                if tensor.is_cuda:  # later stages have shapes in place of patches
                    tensor.record_stream(current)
        return batch

    def _broadcast_patches(self, full: Tensor | None, shape: Tensor) -> Tensor:
        """Broadcast the first rank's `full` to all ranks, which know only its `shape`."""
        if full is None:
            full = torch.empty_like(shape, device=self._device)
        else:
            full = full.to(self._device, non_blocking=True).contiguous()
        if self._group.size() > 1:
            dist.broadcast(full, group=self._group, group_src=0)
        return full
