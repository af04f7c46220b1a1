"""Samples and ways to batch them. Labels, positions and masks are random on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs

Media = tuple[str, int, int, int]  # image | video, frames, rows, columns


@dataclass
class Sample:
    """One unpadded sample in Hugging Face's form."""

    input_ids: Tensor  # (1, S)
    position_ids: Tensor  # (3, 1, S), growing by 0 to 3 on each axis independently
    labels: Tensor  # (1, S)
    loss_mask: Tensor  # (1, S) float
    media: dict[str, Tensor]  # pixel_values, image_grid_thw, …


@dataclass
class MicroBatch:
    """Samples side by side (padded) or end to end (packed)."""

    input_ids: Tensor  # (B, S)
    position_ids: Tensor  # (3, B, S)
    labels: Tensor  # (B, S)
    loss_mask: Tensor  # (B, S)
    attention_mask: Tensor | None  # (B, S)
    visual: VisualInputs | None
    packed_seq_params: PackedSeqParams | None
    place: list[tuple[int, slice]]  # row and columns of each sample


def sample(a: Architecture, length: int, media: Sequence[Media] = (), seed: int = 0) -> Sample:
    random = torch.Generator().manual_seed(seed)
    special = min(a.image_token_id, a.video_token_id, a.vision_start_token_id)
    ids = torch.randint(0, special, (1, length), generator=random)
    tokens = {"image": a.image_token_id, "video": a.video_token_id}
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    at = 1
    for kind, *grid in media:
        grids[kind].append(grid)
        for _ in range(grid[0]):
            count = grid[1] * grid[2] // 4
            ids[0, at : at + count] = tokens[kind]
            at += count + 1
    assert at <= length
    inputs: dict[str, Tensor] = {}
    for kind, suffix in (("image", ""), ("video", "_videos")):
        if grids[kind]:
            grid_thw = torch.tensor(grids[kind])
            patches = int(grid_thw.prod(1).sum())
            inputs[f"{kind}_grid_thw"] = grid_thw
            inputs[f"pixel_values{suffix}"] = torch.randn(
                patches, a.vision.patch_dim, generator=random
            )
    return Sample(
        ids,
        torch.randint(0, 4, (3, 1, length), generator=random).cumsum(-1),
        torch.randint(0, a.vocab_size, (1, length), generator=random),
        (torch.rand(1, length, generator=random) < 0.8).float(),
        inputs,
    )


def padded(
    a: Architecture, samples: Sequence[Sample], length: int, left: bool = False
) -> MicroBatch:
    """Put each sample in a row of its own, padded to `length`."""
    place = []
    for row, s in enumerate(samples):
        n = s.input_ids.shape[1]
        place.append((row, slice(length - n, length) if left else slice(0, n)))

    def rows(name: str, value: float = 0) -> Tensor:
        parts = []
        for s in samples:
            tensor = getattr(s, name)
            missing = length - tensor.shape[-1]
            parts.append(F.pad(tensor, (missing, 0) if left else (0, missing), value=value))
        return torch.cat(parts, dim=-2)

    mask = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, columns in place:
        mask[row, columns] = 1
    return _batch(a, samples, rows, place, None if bool(mask.all()) else mask, None)


def packed(
    a: Architecture, samples: Sequence[Sample], multiple: int = 1, tail: int = 0
) -> MicroBatch:
    """Put all samples in one row, each padded to `multiple`, with `tail` padding tokens last."""
    place, bounds, at = [], [0], 0
    for s in samples:
        n = s.input_ids.shape[1]
        place.append((0, slice(at, at + n)))
        at += -(-n // multiple) * multiple
        bounds.append(at)
    length = at + tail
    if tail:
        bounds.append(length)

    def rows(name: str, value: float = 0) -> Tensor:
        first = getattr(samples[0], name)
        row = torch.full((*first.shape[:-1], length), value).to(first.dtype)
        for s, (_, columns) in zip(samples, place, strict=True):
            row[..., columns] = getattr(s, name)
        return row

    mask = torch.zeros(1, length, dtype=torch.int64)
    for _, columns in place:
        mask[0, columns] = 1
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    return _batch(a, samples, rows, place, None if bool(mask.all()) else mask, params)


def _batch(a, samples, rows, place, mask, params) -> MicroBatch:  # type: ignore[no-untyped-def]
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    media = {
        name: torch.cat(found)
        for name in names
        if (found := [s.media[name] for s in samples if name in s.media])
    }
    ids = rows("input_ids", 7)
    return MicroBatch(
        ids,
        rows("position_ids"),
        rows("labels"),
        rows("loss_mask"),
        mask,
        visual_inputs(a, ids, **media),
        params,
        place,
    )
