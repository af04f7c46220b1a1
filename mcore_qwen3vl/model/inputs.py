"""A micro-batch as the model takes it: the vision tower's inputs, and the positions of a rank.

Data workers compute the tower's inputs on the host. Everything whose shape depends on the images is
computed here, so that the forward pass needs no host sync.

Every rank receives full sequences, and takes its own part under CP, packing and SP. Only
:func:`local_positions` knows the order: token and position ids, labels, visual features and rotary
angles are all divided with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Self

import torch
from torch import Tensor
from transformers import vision_utils

from mcore_qwen3vl.config import Architecture, VisionArchitecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, "batch")

# Until transformers 5.14 the tower took (4, P) ``bilinear_indices`` and ``bilinear_weights``, which
# another function computes; since then (P, 4) ``interp_indices`` and ``interp_weights``.
_interpolation = getattr(vision_utils, "get_vision_interpolation_indices_and_weights", None)

# Fields of VisualInputs with one row per patch.
PER_PATCH = (
    "pixel_values",
    "rotary_position_ids",
    "interpolation_indices",
    "interpolation_weights",
)


@dataclass(frozen=True)
class PixelScale:
    """Normalises pixel bytes for the tower: ``(byte - mean) / std``, rounded as in HF."""

    mean: Tensor  # (patch_dim,) float32, host
    std: Tensor  # (patch_dim,) float32, host

    def apply(self, pixels: Tensor) -> Tensor:
        """Normalise (P, patch_dim) uint8 to float32, on the same device."""
        mean, std = (to_device(tensor, pixels.device) for tensor in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)


@dataclass(frozen=True)
class VisualInputs:
    """The images, then the videos, of one micro-batch: P patches that merge into N features.

    Patches are ordered frame by frame, and within a frame merge block by merge block, as the HF
    processor orders them. The tensors with a patch axis move to the device; `grid_thw` and
    `token_index` stay on the host, where the forward pass reads them without a host sync.

    Pixels are either normalised, or bytes with a `pixel_scale`. Bytes take a quarter of the memory
    to move between processes, ranks and devices; the tower then normalises those that it encodes.
    """

    pixel_values: Tensor  # (P, patch_dim) floating point, or uint8 with `pixel_scale`
    grid_thw: Tensor  # (images + videos, 3) int64, host: frames, rows, columns in patches
    token_index: Tensor  # (N,) int64, host: feature row -> b * S + s of its placeholder
    rotary_position_ids: Tensor  # (P, 2) int64: row and column of each patch
    interpolation_indices: Tensor  # (P, 4) int64: corners in the learned position grid
    interpolation_weights: Tensor  # (P, 4) float32: bilinear weights of these corners
    pixel_scale: PixelScale | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            BadInput: pixels are bytes without a scale, or floating point with one.
        """
        if (self.pixel_values.dtype == torch.uint8) != (self.pixel_scale is not None):
            raise BadInput(
                f"The pixels are {self.pixel_values.dtype} "
                f"{'without' if self.pixel_scale is None else 'with'} a pixel_scale: bytes need "
                "one, and normalised pixels must not have one."
            )

    @property
    def frame_patches(self) -> Tensor:
        """Number of patches in each frame, (F,) int64, host. Attention never leaves a frame."""
        frames, rows, columns = self.grid_thw.unbind(1)
        return torch.repeat_interleave(rows * columns, frames)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move the tensors with a patch axis; `grid_thw` and `token_index` stay on the host."""
        return replace(
            self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in PER_PATCH}
        )

    def pin_memory(self) -> Self:
        """Copy to pinned memory, so that a non-blocking :meth:`to` overlaps with compute."""
        return replace(self, **{n: getattr(self, n).pin_memory() for n in PER_PATCH})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to `device` without a host sync."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a copy from pageable memory would block the host
    return tensor.to(device, non_blocking=True)


def visual_inputs(
    architecture: Architecture,
    input_ids: Tensor,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
) -> VisualInputs | None:
    """Check one micro-batch's images and videos against its placeholders and index them.

    Args:
        input_ids: (B, S) integers, the whole micro-batch; (1, S) when packed.
        pixel_values: (P_images, patch_dim), as the HF image processor returns it.
        image_grid_thw: (images, 3) frames, rows and columns in patches.
        pixel_values_videos: (P_videos, patch_dim), as the HF video processor returns it.
        video_grid_thw: (videos, 3).

    Returns:
        The indexed inputs, on the CPU; None if the micro-batch is text only.

    Raises:
        BadInput: pixels, grids and placeholders do not fit together.
    """
    vision = architecture.vision
    tokens = input_ids.flatten()
    kinds = [
        ("image", pixel_values, image_grid_thw, architecture.image_token_id),
        ("video", pixel_values_videos, video_grid_thw, architecture.video_token_id),
    ]
    pixels, grids, indexes = [], [], []
    for kind, values, grid, token_id in kinds:
        index = torch.nonzero(tokens == token_id).squeeze(1)  # (N_kind,)
        if (values is None) != (grid is None):
            present, absent = ("pixels", "grid_thw") if grid is None else ("grid_thw", "pixels")
            raise BadInput(f"{kind} {present} came without {kind} {absent}; pass both or neither.")
        if values is None or grid is None:
            values, grid = torch.empty(0, vision.patch_dim), torch.empty(0, 3, dtype=torch.int64)
        grid = grid.to("cpu", torch.int64)
        _check_kind(kind, values, grid, len(index), vision)
        pixels.append(values)
        grids.append(grid)
        indexes.append(index)

    grid_thw = torch.cat(grids)
    if len(grid_thw) == 0:
        return None
    indices, weights = _interpolation_corners(grid_thw, vision)
    return VisualInputs(
        # An empty kind must not decide the dtype of the other.
        pixel_values=torch.cat([values for values in pixels if len(values)]),
        grid_thw=grid_thw,
        token_index=torch.cat(indexes),
        rotary_position_ids=vision_utils.get_vision_position_ids(
            grid_thw, vision.spatial_merge_size
        ),
        interpolation_indices=indices,
        interpolation_weights=weights,
    )


def _interpolation_corners(grid_thw: Tensor, vision: VisionArchitecture) -> tuple[Tensor, Tensor]:
    """Return the place of each of P patches in the square grid of learned positions.

    It is four corners (P, 4) int64, and their bilinear weights (P, 4) float32.
    """
    side, merge = int(vision.num_position_embeddings**0.5), vision.spatial_merge_size
    if _interpolation is None:
        indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(
            grid_thw, num_grid_per_side=side, spatial_merge_size=merge
        )
        return indices.t().long(), weights.t()
    return _interpolation(
        grid_thw,
        num_grid_per_side=side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge,
    )


def interpolation_arguments(indices: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the arguments of the tower's forward, for tensors as in :class:`VisualInputs`."""
    if _interpolation is None:
        return {"bilinear_indices": indices.t(), "bilinear_weights": weights.t()}
    return {"interp_indices": indices, "interp_weights": weights}


def check_one_frame(image_grid_thw: Tensor) -> None:
    """Check that every image has one frame: (images, 3) frames, rows and columns in patches.

    It raises BadInput if an image has several, for which its prompt has no timestamps.
    """
    for index, (frames, *_) in enumerate(image_grid_thw.tolist()):
        if frames != 1:
            raise BadInput(
                f"image_grid_thw gives image {index} {frames} frames; pass it as a video, whose "
                "frames are separated by timestamps."
            )


def _check_kind(
    kind: str, values: Tensor, grid: Tensor, placeholders: int, vision: VisionArchitecture
) -> None:
    """Check that the pixels fill the grids, and the grids' merged features the placeholders."""
    merge = vision.spatial_merge_size
    if grid.ndim != 2 or grid.shape[1] != 3:
        raise BadInput(f"{kind}_grid_thw has shape {tuple(grid.shape)}; (number, 3) is needed.")
    if bool((grid < 1).any() | (grid[:, 1:] % merge != 0).any()):
        raise BadInput(
            f"{kind}_grid_thw is {grid.tolist()}: frames, rows and columns must be positive, and "
            f"rows and columns multiples of spatial_merge_size {merge}. Use the model's own "
            "processor."
        )
    if kind == "image":
        check_one_frame(grid)
    if values.ndim != 2 or values.shape[1] != vision.patch_dim:
        raise BadInput(
            f"{kind} pixels have shape {tuple(values.shape)}; (patches, {vision.patch_dim}) is "
            "needed. Use the processor that belongs to this checkpoint."
        )
    patches = int(grid.prod(1).sum())
    if len(values) != patches:
        raise BadInput(
            f"{len(values)} {kind} patches were given, but {kind}_grid_thw {grid.tolist()} "
            f"describes {patches}. Pixels and grids must come from the same processor call."
        )
    features = patches // merge**2
    if placeholders == features:
        return
    if len(grid) == 0:
        raise BadInput(
            f"The prompt holds {placeholders} {kind} placeholders, but no {kind} came with it. "
            f"Pass the {kind}'s pixels and grid, or take the placeholders out."
        )
    if placeholders == 0:
        raise BadInput(
            f"{len(grid)} {kind}(s) with {features} features came with a prompt that holds no "
            f"{kind} placeholder. Put the {kind} into the chat message, or leave its pixels out."
        )
    raise BadInput(
        f"The prompt holds {placeholders} {kind} placeholders, but its {len(grid)} {kind}(s) give "
        f"{features} features. Truncate between messages, never inside an {kind}, and expand the "
        "placeholders with the model's own processor."
    )


def local_positions(
    seq_len: int,
    *,
    cp_size: int,
    cp_rank: int,
    tp_size: int = 1,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the global positions that one rank holds, in the rank's order.

    CP divides a sequence into ``2 * cp_size`` chunks and gives rank r the r-th from the start and
    the r-th from the end, so that causal attention costs every rank the same (mcore
    ``get_batch_on_this_cp_rank``). With packing, each sub-sequence is divided that way (Transformer
    Engine ``thd_get_partitioned_indices``). SP then takes a contiguous part of the CP rank's
    positions.

    Args:
        seq_len: S, the length of the full (or packed) sequence.
        cp_size, cp_rank: of the context-parallel group.
        tp_size, tp_rank: of the tensor-parallel group; used with `sequence_parallel` only.
        sequence_parallel: whether hidden states are divided over the TP group too.
        cu_seqlens: (samples + 1,) integers from 0 to `seq_len` on the host: bounds of the packed
            sub-sequences, padding included. None: one sequence.

    Returns:
        (S / cp,) int64 on the CPU, or (S / cp / tp,) with `sequence_parallel`.

    Raises:
        BadInput: a length cannot be divided so, or `cu_seqlens` does not cover `seq_len`.
    """
    if cu_seqlens is not None:
        _check_bounds(seq_len, cu_seqlens)
    positions = torch.arange(seq_len)
    if cp_size > 1:
        positions = positions[_cp_mask(seq_len, cp_size, cp_rank, cu_seqlens)]
    if sequence_parallel and tp_size > 1:
        if len(positions) % tp_size != 0:
            raise BadInput(
                f"Sequence parallelism cuts the {len(positions)} tokens of each CP rank "
                f"(sequence length {seq_len}, CP {cp_size}) into TP {tp_size} equal parts, which "
                f"is impossible: pad sequences to a multiple of {length_multiple(cp_size, tp_size)}"
                "."
            )
        positions = positions.chunk(tp_size)[tp_rank]
    return positions


def length_multiple(
    cp_size: int, tp_size: int = 1, sequence_parallel: bool = True, *, local: int = 1
) -> int:
    """Return the number that an unpacked sequence's length must be a multiple of.

    A rank's part of it is then a multiple of `local`. For the others see :func:`local_positions`.
    """
    zigzag = 2 * cp_size if cp_size > 1 else 1  # each CP rank has two chunks
    shards = cp_size * (tp_size if sequence_parallel else 1)
    return lcm(zigzag, shards * local)


def check_shapes(input_ids: Tensor, position_ids: Tensor, *, packed: bool) -> None:
    """Raise BadInput if the shapes of a micro-batch do not agree."""
    batch, seq_len = input_ids.shape
    if position_ids.shape != (3, batch, seq_len):
        raise BadInput(
            f"position_ids have shape {tuple(position_ids.shape)}; they have time, height and "
            f"width for each of the {batch} x {seq_len} tokens: (3, {batch}, {seq_len})."
        )
    if packed and batch != 1:
        raise BadInput(f"A packed micro-batch has one row; input_ids have {batch}.")


def require_right_padding(padding: Tensor) -> None:
    """Refuse padding on the left, from which causal attention does not keep the tokens.

    For a mask on a device the check is a device-side assertion, which takes no host sync. If it
    fails, the process cannot use CUDA any more. `padding` is (B, S) bool, True for padding.

    Raises:
        BadInput: there is padding before a token, in a tensor on the host.
    """
    right = (padding[:, 1:] >= padding[:, :-1]).all()
    refusal = "The te spec takes padding on the right only: pad there, or use the torch spec."
    if padding.is_cuda:
        torch._assert_async(right, refusal)
    elif not right:
        raise BadInput(refusal)


def _cp_mask(seq_len: int, cp_size: int, cp_rank: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return (S,) bool: True in the rank's two chunks of every sub-sequence."""
    bounds = torch.tensor([0, seq_len]) if cu_seqlens is None else cu_seqlens.long()
    lengths = bounds.diff()
    odd = lengths[lengths % (2 * cp_size) != 0]
    if len(odd):
        raise BadInput(
            f"CP {cp_size} cuts every {'sequence' if cu_seqlens is None else 'packed sample'} into "
            f"{2 * cp_size} equal chunks, but one has length {int(odd[0])}: pad lengths to a "
            f"multiple of {2 * cp_size}."
        )
    offset = torch.arange(seq_len) - torch.repeat_interleave(bounds[:-1], lengths)
    chunk = offset * (2 * cp_size) // torch.repeat_interleave(lengths, lengths)
    return (chunk == cp_rank) | (chunk == 2 * cp_size - 1 - cp_rank)


def _check_bounds(seq_len: int, cu_seqlens: Tensor) -> None:
    """Raise BadInput unless the bounds rise from 0 to `seq_len`."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if (first, last) != (0, seq_len) or bool((cu_seqlens.diff() < 0).any()):
        raise BadInput(
            f"cu_seqlens runs from {first} to {last} over a packed sequence of {seq_len} tokens: "
            "it must rise from 0 to the full length, so make the tail padding a sample of its own."
        )
