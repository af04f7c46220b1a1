"""Decoding of a sample's images and videos into patches, by HF's processors.

HF's image and video processors decode and resize to uint8, and then normalise to float32. Here
patches stay uint8 until they are on the device (:class:`mcore_qwen3vl.model.inputs.PixelScale`):
the result is the same, bit for bit, and only a quarter of the bytes are copied and sent.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.image_utils import ChannelDimension

from mcore_qwen3vl.data.encoding.planning import Pixels, PlannedMedia
from mcore_qwen3vl.data.records.media import load_image
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.records.video import load_frames
from mcore_qwen3vl.model.inputs import PixelScale


class PixelLoader:
    """A loader that decodes and resizes images and videos and cuts them into patches.

    They are normalised with its `scale` later; it is None if HF's processors normalise them,
    because images and videos do not have the same scale.
    """

    def __init__(self, processor: Any) -> None:
        self._images, self._videos = processor.image_processor, processor.video_processor
        self.scale = _common_scale(self._images, self._videos)
        # Passed only if needed: HF's processor validates each option.
        raw = {"do_rescale": False, "do_normalize": False}
        self._options: dict[str, Any] = {"return_tensors": "pt", **(raw if self.scale else {})}

    def load(self, media: list[PlannedMedia]) -> Pixels:
        """Decode the media of one sample."""
        images = [item for item in media if item.media.kind == "image"]
        videos = [item for item in media if item.media.kind == "video"]
        return Pixels(
            *_load_in_runs(images, self._load_images), *_load_in_runs(videos, self._load_videos)
        )

    def _options_for(self, items: list[PlannedMedia]) -> dict[str, Any]:
        """Return the options of a call for media of one size."""
        return self._options if items[0].size is None else {**self._options, "size": items[0].size}

    def _load_images(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        images = [load_image(item.media) for item in items]
        out = self._images(images=images, **self._options_for(items))
        return _require_expected_patches(items, out["pixel_values"], out["image_grid_thw"])

    def _load_videos(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        frames, metadata = [], []
        for item in items:
            assert item.metadata is not None
            decoded = load_frames(item.media, item.metadata.frames_indices)  # (F, H, W, 3)
            frames.append(torch.from_numpy(decoded).permute(0, 3, 1, 2))
            metadata.append(item.metadata)
        out = self._videos(
            videos=frames,
            video_metadata=metadata,
            do_sample_frames=False,
            input_data_format=ChannelDimension.FIRST,
            **self._options_for(items),
        )
        return _require_expected_patches(items, out["pixel_values_videos"], out["video_grid_thw"])


def _load_in_runs(
    items: list[PlannedMedia], load: Callable[[list[PlannedMedia]], tuple[Tensor, Tensor]]
) -> tuple[Tensor | None, Tensor | None]:
    """Load media of one ``size`` after another at once, since HF's processors take one a call."""
    loaded = [load(list(run)) for _, run in groupby(items, key=lambda item: item.size)]
    if len(loaded) < 2:
        return loaded[0] if loaded else (None, None)
    values, grids = zip(*loaded, strict=True)
    return torch.cat(values), torch.cat(grids)


def _common_scale(images: Any, videos: Any) -> PixelScale | None:
    """Return the scale of both processors; None unless both rescale and normalise alike."""
    settings = [
        (p.do_rescale, p.do_normalize, p.rescale_factor, tuple(p.image_mean), tuple(p.image_std))
        for p in (images, videos)
    ]
    rescales, normalizes, factor, mean, std = settings[0]
    if settings[0] != settings[1] or not (rescales and normalizes):
        return None
    # HF's own numbers, with the rescaling folded into the mean and the standard deviation.
    fused_mean, fused_std, _ = images._fuse_mean_std_and_rescale_factor(
        do_normalize=True, image_mean=mean, image_std=std, do_rescale=True, rescale_factor=factor
    )
    per_channel = images.temporal_patch_size * images.patch_size**2
    return PixelScale(
        fused_mean.repeat_interleave(per_channel), fused_std.repeat_interleave(per_channel)
    )


def _require_expected_patches(
    items: list[PlannedMedia], values: Tensor, grid: Tensor
) -> tuple[Tensor, Tensor]:
    """Return pixels and grid if they agree with the sizes that placeholders were counted from."""
    for item, patches in zip(items, grid.prod(1).tolist(), strict=True):
        if patches != item.patches:
            raise BadSample(
                f"{item.media.kind} {item.media.name} decodes to {patches} patches, but its header "
                f"promised {item.patches}. Write the file again."
            )
    return values, grid
