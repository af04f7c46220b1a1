"""A micro-batch, ready for the model: its tensors, what a task needs besides, and its assembly.

:class:`Batcher` makes one of encoded samples: padded or packed, with labels, 3-D positions that
begin anew with each sample, and the boundaries of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.planning import Pixels, Plan
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import (
    PER_PATCH,
    PixelScale,
    VisualInputs,
    check_one_frame,
    visual_inputs,
)

IGNORED = -100
"""The label of positions that are not trained, as in HF."""

_PER_TOKEN = ("input_ids", "labels", "loss_weights", "position_ids", "padding_mask")


@dataclass(frozen=True)
class Counts:
    """Counts of what a batch holds, for logs; they can be summed over micro-batches and ranks."""

    samples: int = 0
    tokens: int = 0  # without padding
    capacity: int = 0  # with padding: tokens / capacity is the packing efficiency
    trained_tokens: int = 0
    images: int = 0
    videos: int = 0
    patches: int = 0
    skipped: int = 0  # bad samples since the data worker's last batch
    dropped: int = 0  # over-long samples since the data worker's last batch

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))


@dataclass
class Batch:
    """One micro-batch of full sequences; B is 1 when packed.

    Padding is on the right of a row. In a packed batch it is at the end of each sub-sequence, and a
    last sub-sequence may be all padding. Causal attention within sub-sequences never lets a token
    see padding, so no attention mask is needed.
    """

    input_ids: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64: the next token of the same sample, IGNORED if not trained
    loss_weights: Tensor  # (B, S) float32: weight of the label, 0 if not trained
    position_ids: Tensor  # (3, B, S) int64
    padding_mask: Tensor  # (B, S) bool: True at padding
    cu_seqlens: Tensor | None  # (sub-sequences + 1,) int32 from 0 to S when packed
    max_seqlen: int | None  # when packed: length of the longest sub-sequence, padding included
    visual: VisualInputs | None
    counts: Counts
    names: tuple[str, ...]  # file and line of each sample
    lengths: tuple[int, ...] = ()  # tokens of each sample, without padding
    data_sets: tuple[str, ...] = ()  # name of each sample's data set; empty if there is only one
    groups: tuple[int, ...] = ()  # samples of each record, for records of several samples
    task: TaskInputs | None = None
    is_spare: bool = False
    """Whether it counts for nothing: a rank without a record still takes part in every step."""
    __restore_key__: tuple = ()  # set and read by energon

    def inputs_of[Kind: TaskInputs](self, kind: type[Kind]) -> Kind:
        """Return the task's inputs, or raise BadInput if they are not of this kind."""
        if not isinstance(self.task, kind):
            raise BadInput(
                f"The loss needs a batch whose task is {kind.__name__}, and this one's is "
                f"{self.task and type(self.task).__name__}."
            )
        return self.task

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move the tensors, except those that :class:`VisualInputs` keeps on the host."""
        return self._moved(
            lambda tensor: tensor.to(device, non_blocking=non_blocking),
            self.visual and self.visual.to(device, non_blocking),
        )

    def pin_memory(self) -> Self:
        """Return a page-locked copy, so that ``to(device, non_blocking=True)`` overlaps compute."""
        return self._moved(Tensor.pin_memory, self.visual and self.visual.pin_memory())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Replace each tensor by `function` of it, except `cu_seqlens`, which the host reads, and
        those of `visual`."""
        mapped: dict[str, Any] = {name: function(getattr(self, name)) for name in _PER_TOKEN}
        if self.task is not None:
            inputs: dict[str, Any] = {
                name: value.map_tensors(function) if isinstance(value, Batch) else function(value)
                for name, value in vars(self.task).items()
            }
            mapped["task"] = type(self.task)(**inputs)
        return replace(self, **mapped)

    def device_tensors(self) -> list[Tensor]:
        """Return all tensors that move to the device; the reading stream must keep them.

        They are the tensors that :meth:`map_tensors` replaces, and those with a patch axis.
        """
        tensors = [getattr(self, name) for name in _PER_TOKEN]
        tensors += [getattr(self.visual, name) for name in PER_PATCH] if self.visual else []
        for value in vars(self.task).values() if self.task else ():
            tensors += value.device_tensors() if isinstance(value, Batch) else [value]
        return tensors

    def sequences(self) -> Tensor:
        """Return (B, S) int64 on the host: the number of the sequence of each position."""
        rows, length = self.input_ids.shape
        if self.cu_seqlens is None:
            return torch.arange(rows)[:, None].expand(rows, length).contiguous()
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]

    def _moved(self, function: Callable[[Tensor], Tensor], visual: VisualInputs | None) -> Self:
        bounds = None if self.cu_seqlens is None else function(self.cu_seqlens)
        return replace(self.map_tensors(function), cu_seqlens=bounds, visual=visual)


class Batcher:
    """An assembler of batches: samples packed into one sequence, or padded to one a row."""

    def __init__(
        self,
        architecture: Architecture,
        config: DataConfig,
        pad_id: int,
        pixel_scale: PixelScale | None,
    ) -> None:
        self._architecture = architecture
        self._config = config
        self._pad_id = pad_id
        self._pixel_scale = pixel_scale

    def pack(self, plans: Sequence[Plan], names: Sequence[str]) -> Batch:
        """Make one sequence of `seq_length`: each plan is a sub-sequence, the rest padding.

        The media of `plans` are decoded; `names` are those of their samples, for messages.
        """
        lengths = [self._config.padded(len(plan.input_ids)) for plan in plans]
        bounds = [0, *accumulate(lengths)]
        seq_length = self._config.seq_length
        assert bounds[-1] <= seq_length, "the packer chose more than fits"
        if bounds[-1] < seq_length:
            bounds.append(seq_length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        places = [(0, start) for start in bounds[: len(plans)]]
        return self._assemble(plans, names, places, (1, seq_length), cu_seqlens)

    def pad(self, plans: Sequence[Plan], names: Sequence[str]) -> Batch:
        """Make a batch with one plan a row, padded on the right; see :meth:`pack`."""
        width = self._config.seq_length
        rows = len(plans)
        if self._config.pad_to_longest:
            width = self._config.padded(max(len(plan.input_ids) for plan in plans))
        else:  # stages may transfer batches of one shape only
            rows = max(rows, self._config.micro_batch_size)
        places = [(row, 0) for row in range(len(plans))]
        return self._assemble(plans, names, places, (rows, width), None)

    def _assemble(
        self,
        plans: Sequence[Plan],
        names: Sequence[str],
        places: list[tuple[int, int]],
        shape: tuple[int, int],
        cu_seqlens: Tensor | None,
    ) -> Batch:
        """Write each plan at its (row, column), and compute positions and visual indices."""
        input_ids = torch.full(shape, self._pad_id)
        labels = torch.full(shape, IGNORED)
        loss_weights = torch.zeros(shape)
        padding_mask = torch.ones(shape, dtype=torch.bool)
        for plan, (row, start) in zip(plans, places, strict=True):
            tokens, weights = map(torch.from_numpy, (plan.input_ids, plan.loss_weights))
            end = start + len(tokens)
            # The last token of a sample predicts nothing: the next token is another sample's.
            weights = weights[1:]
            input_ids[row, start:end] = tokens
            labels[row, start : end - 1] = tokens[1:].where(weights > 0, IGNORED)
            loss_weights[row, start : end - 1] = weights
            padding_mask[row, start:end] = False

        patches = _join_patches([plan.pixels for plan in plans])
        image_grid = _join_grids([plan.pixels.image_grid_thw for plan in plans])
        video_grid = _join_grids([plan.pixels.video_grid_thw for plan in plans])
        position_ids, _ = mrope_position_ids(
            self._architecture,
            input_ids,
            image_grid,
            video_grid,
            attention_mask=~padding_mask,
            cu_seqlens=cu_seqlens,
        )
        return Batch(
            input_ids=input_ids,
            labels=labels,
            loss_weights=loss_weights,
            position_ids=position_ids,
            padding_mask=padding_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=None if cu_seqlens is None else int(cu_seqlens.diff().max()),
            visual=self._index_patches(input_ids, patches, image_grid, video_grid),
            counts=Counts(
                samples=len(plans),
                tokens=int((~padding_mask).sum()),
                capacity=padding_mask.numel(),
                trained_tokens=int((loss_weights > 0).sum()),
                images=_row_count(image_grid),
                videos=_row_count(video_grid),
                patches=_row_count(patches),
            ),
            names=tuple(names),
            lengths=tuple(len(plan.input_ids) for plan in plans),
        )

    def _index_patches(
        self,
        input_ids: Tensor,
        patches: Tensor | None,
        image_grid: Tensor | None,
        video_grid: Tensor | None,
    ) -> VisualInputs | None:
        """Check and index the patches by their shapes alone, since they are joined already."""
        if patches is None:
            return visual_inputs(self._architecture, input_ids)
        images = 0 if image_grid is None else int(image_grid.prod(1).sum())
        shapes = torch.empty_like(patches, dtype=torch.float32, device="meta")
        of_images = (None, None) if image_grid is None else (shapes[:images], image_grid)
        of_videos = (None, None) if video_grid is None else (shapes[images:], video_grid)
        visual = visual_inputs(self._architecture, input_ids, *of_images, *of_videos)
        assert visual is not None
        return replace(visual, pixel_values=patches, pixel_scale=self._pixel_scale)


def without_pixels(visual: VisualInputs) -> VisualInputs:
    """Replace the tensors that have a row per patch by meta tensors of the same shape and dtype."""
    return replace(visual, **{n: getattr(visual, n).to("meta") for n in PER_PATCH})


def _row_count(tensor: Tensor | None) -> int:
    return 0 if tensor is None else len(tensor)


def _join_patches(pixels: Sequence[Pixels]) -> Tensor | None:
    """Join the patches of all images, then of all videos, to (P, patch_dim) with one copy.

    In a data worker they are written to shared memory, from which the batch is sent.
    """
    values = [p.pixel_values for p in pixels] + [p.pixel_values_videos for p in pixels]
    present = [tensor for tensor in values if tensor is not None]
    if not present:
        return None
    if get_worker_info() is None:
        return torch.cat(present) if len(present) > 1 else present[0]
    first = present[0]
    rows, width = sum(len(tensor) for tensor in present), first.shape[1]
    # torch's own collate function shares memory in this way.
    storage = first._typed_storage()._new_shared(rows * width, device=first.device)
    return torch.cat(present, out=first.new(storage).resize_(rows, width))


def _join_grids(grids: Sequence[Tensor | None]) -> Tensor | None:
    """Join the grids that are not None, in order, to (n, 3); None if there is none."""
    present = [grid for grid in grids if grid is not None]
    return torch.cat(present) if present else None


def mrope_position_ids(
    architecture: Architecture,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the three-axis position ids (MRoPE) of a micro-batch, padded or packed.

    Source: HF ``Qwen3VLModel.get_rope_index``; Wang et al., "Qwen2-VL", 2024, section 2.1. Each
    text token advances all axes by one. An image, or one frame of a video, has one temporal
    position, spans its merged rows and columns on the other two axes, and advances the count by its
    longer side. All of it is computed at once on the host.

    Args:
        input_ids: (B, S) integers; (1, S) when packed. All tensors are on the CPU.
        image_grid_thw: (images, 3) frames (always 1), rows and columns in patches, in the order
            of the images in `input_ids`.
        video_grid_thw: (videos, 3), in the same form. Timestamps stand between frames, so each
            frame of a video is a separate run of placeholders.
        attention_mask: (B, S), nonzero for tokens and 0 for padding, on either side.
        cu_seqlens: (samples + 1,) bounds of the packed samples, from 0 to S; positions restart at
            each. None: one sample a row.

    Returns:
        Positions (3, B, S) int64: temporal, row, column; 0 at padding. And the rope deltas
        (samples, 1) int64, which are added to a sample's token count to get its next position. Both
        are as in transformers 5; transformers 4.57 gives the same positions but 1 at padding, and
        deltas relative to S, padding included.

    Raises:
        BadInput: the runs of placeholders do not match the grids.
    """
    batch_size, seq_len = input_ids.shape
    lengths = np.full(batch_size, seq_len) if cu_seqlens is None else np.diff(cu_seqlens.numpy())
    if lengths.sum() != batch_size * seq_len:
        raise BadInput(
            f"cu_seqlens ends at {lengths.sum()}, but the packed batch has {batch_size * seq_len} "
            "tokens: it must cover the tail padding too."
        )
    tokens = input_ids.numpy().ravel()
    sample = np.repeat(np.arange(len(lengths)), lengths)
    if attention_mask is None:
        valid = np.arange(len(tokens))
    else:
        valid = np.flatnonzero(attention_mask.numpy())
    tokens, sample = tokens[valid], sample[valid]  # (T,)

    merge = architecture.vision.spatial_merge_size
    grids = [
        _Grids("image", tokens == architecture.image_token_id, sample, image_grid_thw, merge),
        _Grids("video", tokens == architecture.video_token_id, sample, video_grid_thw, merge),
    ]
    step = np.ones(len(tokens), np.int64)  # (T,) by how much each token advances the count
    for grid in grids:
        step[grid.tokens] = 0
        step[grid.starts] = np.maximum(grid.rows, grid.columns)
    counted = np.bincount(sample, step, len(lengths)).astype(np.int64)  # (samples,)
    count = np.cumsum(step) - step - (np.cumsum(counted) - counted)[sample]  # (T,)

    positions = np.zeros((3, batch_size * seq_len), np.int64)
    positions[:, valid] = count
    for grid in grids:
        positions[:, valid[grid.tokens]] = count[grid.starts][grid.run] + grid.offsets()
    deltas = counted - np.bincount(sample, minlength=len(lengths))
    return (
        torch.from_numpy(positions.reshape(3, batch_size, seq_len)),
        torch.from_numpy(deltas[:, None]),
    )


class _Grids:
    """The runs of one kind of placeholder, matched with the grids of that kind.

    Args:
        is_placeholder: (T,) bool.
        sample: (T,) the sample of each token; a run ends with its sample.
        grid_thw: (grids, 3) in patches; each of a grid's frames fills one run.
        merge: patches per feature along a side.
    """

    def __init__(
        self,
        kind: str,
        is_placeholder: np.ndarray,
        sample: np.ndarray,
        grid_thw: Tensor | None,
        merge: int,
    ) -> None:
        begins = is_placeholder.copy()
        begins[1:] &= ~(is_placeholder[:-1] & (sample[1:] == sample[:-1]))
        self.starts = np.flatnonzero(begins)  # (R,) first token of each run
        self.tokens = np.flatnonzero(is_placeholder)  # (M,)
        self.run = np.cumsum(begins[self.tokens]) - 1  # (M,) run of each placeholder
        lengths = np.bincount(self.run, minlength=len(self.starts))

        frames, rows, columns = (
            np.empty((3, 0), np.int64) if grid_thw is None else grid_thw.numpy().T
        )
        if kind == "image" and grid_thw is not None:
            check_one_frame(grid_thw)
        self.rows = np.repeat(rows // merge, frames)  # (R,) merged
        self.columns = np.repeat(columns // merge, frames)
        expected = self.rows * self.columns
        if len(expected) != len(lengths):
            raise BadInput(
                f"The prompt has {len(lengths)} runs of {kind} placeholders, but {kind}_grid_thw "
                f"describes {len(expected)} {kind} frames. Keep images and frames apart by their "
                "vision start and end tokens, as the chat template does, and truncate between "
                "messages only."
            )
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            i = wrong[0]
            raise BadInput(
                f"{kind} frame {i} has {lengths[i]} placeholders, but its grid of "
                f"{self.rows[i]} x {self.columns[i]} merged patches needs {expected[i]}. Truncate "
                "between messages, never inside an image or a frame."
            )

    def offsets(self) -> np.ndarray:
        """Return each placeholder's time (0), row and column within its frame, (3, M) int64."""
        within = np.arange(len(self.tokens)) - np.searchsorted(self.tokens, self.starts)[self.run]
        columns = self.columns[self.run]
        return np.stack([np.zeros_like(within), within // columns, within % columns])
