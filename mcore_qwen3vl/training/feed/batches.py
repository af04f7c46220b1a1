"""One stream of batches for all ranks that work on the same micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import PER_PATCH, VisualInputs, to_device
from mcore_qwen3vl.training.feed.stages import StageFeed


class SharedBatches:
    """Batches of one loader, for every rank of a TP x CP group and every chunk of a rank.

    The first rank of the group reads; what is small goes to the others over the host, the tensors
    with a patch axis over the device. Later pipeline stages get what the first one read, through
    its first rank, with shapes in place of those tensors.
    """

    def __init__(
        self,
        loader: Iterator[Batch] | None,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        feed: StageFeed | None = None,
        chunks: int = 1,
        on_batch: Sequence[Callable[[Batch], None]] = (),
    ) -> None:
        """
        Args:
            loader: on the first rank of the first stage's group; None on the others.
            device: where the model is.
            group: the TP x CP group.
            host_group: the same ranks over gloo.
            feed: between the first ranks of all pipeline stages; None on other ranks, or when there
                is one stage.
            chunks: virtual pipeline stages of this rank, each of which gets every batch.
            on_batch: are shown each batch once, on the host and without pixels.
        """
        self._loader = loader
        self._device = device
        self._group = group
        self._host_group = host_group
        self._feed = feed
        self._on_batch = on_batch
        self._waiting: list[deque[Batch]] = [deque() for _ in range(chunks)]

    def chunk(self, index: int) -> Iterator[Batch]:
        """The stream of one virtual pipeline stage."""
        while True:
            if not self._waiting[index]:
                batch = self._next()
                for queue in self._waiting:
                    queue.append(batch)
            yield self._waiting[index].popleft()

    def _next(self) -> Batch:
        read, visual = self._read(), None
        if isinstance(read, Batch) and read.visual is not None and self._loader is not None:
            visual, read = read.visual, replace(read, visual=without_pixels(read.visual))
        if self._feed is not None and self._feed.is_source:
            self._feed.send(read)
        message = [(read, self._loader is not None)]
        if self._group.size() > 1:
            dist.broadcast_object_list(message, group=self._host_group, group_src=0)
        light, pixels_follow = _checked(message[0][0]), message[0][1]
        for show in self._on_batch:
            show(light)
        batch = replace(self._to_device(replace(light, visual=None)), visual=light.visual)
        if light.visual is None or not pixels_follow:
            return batch
        patches: dict[str, Any] = {
            name: self._patches(getattr(visual, name, None), getattr(light.visual, name))
            for name in PER_PATCH
        }
        return replace(batch, visual=replace(light.visual, **patches))

    def _read(self) -> Batch | BadInput | None:
        """The next batch, or what stops the run: the other ranks must hear of it too."""
        if self._loader is not None:
            try:
                return next(self._loader)
            except BadInput as error:
                return error
        received: Batch | BadInput | None = self._feed.receive() if self._feed else None
        return received

    def _to_device(self, batch: Batch) -> Batch:
        """All but cu_seqlens, whose values the host needs."""
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        return replace(batch.to(self._device, non_blocking=True), cu_seqlens=batch.cu_seqlens)

    def _patches(self, full: Tensor | None, shape: Tensor) -> Tensor:
        """The first rank's `full` on all ranks; the others know its `shape` only."""
        if full is None:
            full = torch.empty_like(shape, device=self._device)
        else:
            full = to_device(full, self._device).contiguous()
        if self._group.size() > 1:
            dist.broadcast(full, group=self._group, group_src=0)
        return full


def _checked(message: Any) -> Batch:
    if isinstance(message, BadInput):
        raise message
    assert isinstance(message, Batch)
    return message


def without_pixels(visual: VisualInputs) -> VisualInputs:
    """Shapes and dtypes in place of the tensors with a row a patch, the rest as it is."""
    return replace(visual, **{n: getattr(visual, n).to("meta") for n in PER_PATCH})
