"""Batches from the ranks that read to all other ranks.

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
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch, without_pixels
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.inputs import PER_PATCH, VisualInputs

label_module(__file__, "batch")


def rank_reads() -> bool:
    """Return whether this is the first rank of a first pipeline stage."""
    return is_first_of_tp_cp_group() and parallel_state.get_pipeline_model_parallel_rank() == 0


def is_first_of_tp_cp_group() -> bool:
    """Return whether this rank is the first of its TP x CP group."""
    return bool(parallel_state.get_tensor_and_context_parallel_rank() == 0)


def new_host_group() -> dist.ProcessGroup:
    """Create a gloo group of this rank's TP x CP group, for use by a thread."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    mine = _new_gloo_group(dist.get_process_group_ranks(group))
    assert mine is not None
    return mine


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
            dist.get_process_group_ranks(group) if is_first_of_tp_cp_group() else []
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
        """Return the next batch on the device, and begin to read the batch after it."""
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
