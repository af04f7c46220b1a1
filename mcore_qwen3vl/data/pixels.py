"""Decode the images and videos of a planned sample, with HF's image and video processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.image_utils import ChannelDimension

from mcore_qwen3vl.data.bad_samples import BadSample
from mcore_qwen3vl.data.media import load_frames, load_image
from mcore_qwen3vl.data.planning import PlannedMedia


@dataclass(frozen=True)
class Pixels:
    """Patches of some images and videos, each kind in its order."""

    pixel_values: Tensor | None  # (P_images, patch_dim) float32
    image_grid_thw: Tensor | None  # (images, 3) int64
    pixel_values_videos: Tensor | None  # (P_videos, patch_dim) float32
    video_grid_thw: Tensor | None  # (videos, 3) int64

    @classmethod
    def concatenated(cls, pixels: Sequence[Pixels]) -> Pixels:
        """Those of several samples, in order."""
        return cls(
            _concatenated([p.pixel_values for p in pixels]),
            _concatenated([p.image_grid_thw for p in pixels]),
            _concatenated([p.pixel_values_videos for p in pixels]),
            _concatenated([p.video_grid_thw for p in pixels]),
        )


def _concatenated(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def load_pixels(processor: Any, media: list[PlannedMedia]) -> Pixels:
    """Decode, resize, normalise and cut into patches.

    Args:
        processor: the HF ``Qwen3VLProcessor`` the sample was planned with.
        media: of one sample.

    Raises:
        BadSample: a file is corrupt, or is not what its header promised.
    """
    images = [item for item in media if item.media.kind == "image"]
    videos = [item for item in media if item.media.kind == "video"]
    pixel_values, image_grid = _images(processor.image_processor, images)
    video_values, video_grid = _videos(processor.video_processor, videos)
    return Pixels(pixel_values, image_grid, video_values, video_grid)


def _images(processor: Any, items: list[PlannedMedia]) -> tuple[Tensor | None, Tensor | None]:
    if not items:
        return None, None
    out = processor(images=[load_image(item.media) for item in items], return_tensors="pt")
    return _checked(items, out["pixel_values"], out["image_grid_thw"])


def _videos(processor: Any, items: list[PlannedMedia]) -> tuple[Tensor | None, Tensor | None]:
    if not items:
        return None, None
    frames, metadata = [], []
    for item in items:
        assert item.metadata is not None
        decoded = load_frames(item.media, item.metadata.frames_indices)  # (F, H, W, 3)
        frames.append(torch.from_numpy(decoded).permute(0, 3, 1, 2))
        metadata.append(item.metadata)
    out = processor(
        videos=frames,
        video_metadata=metadata,
        do_sample_frames=False,
        input_data_format=ChannelDimension.FIRST,
        return_tensors="pt",
    )
    return _checked(items, out["pixel_values_videos"], out["video_grid_thw"])


def _checked(items: list[PlannedMedia], values: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The placeholders were counted from the headers: the pixels must agree."""
    for item, patches in zip(items, grid.prod(1).tolist(), strict=True):
        if patches != item.patches:
            raise BadSample(
                f"{item.media.kind} {item.media.name} decodes to {patches} patches, but its header "
                f"promised {item.patches}. Save it anew."
            )
    return values, grid
