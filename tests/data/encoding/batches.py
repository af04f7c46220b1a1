"""Random micro-batches of text, images and videos, as token ids and grids."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture

Segment = int | tuple[str, int, int, int]
"""A count of text tokens, or ("image" | "video", frames, rows, columns) in patches."""


@dataclass
class Sample:
    """One sequence: its token ids, and the grids of its images and of its videos in order."""

    tokens: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)


def sample(architecture: Architecture, segments: list[Segment], rng: random.Random) -> Sample:
    """Make token ids for `segments`, with a two-token timestamp before each frame of a video."""
    special = {
        architecture.image_token_id,
        architecture.video_token_id,
        architecture.vision_start_token_id,
        architecture.vision_end_token_id,
    }
    text = [i for i in range(architecture.vocab_size) if i not in special]
    out = Sample()
    for segment in segments:
        if isinstance(segment, int):
            out.tokens += rng.choices(text, k=segment)
            continue
        kind, *grid = segment
        frames, rows, columns = grid
        (out.images if kind == "image" else out.videos).append((frames, rows, columns))
        token = architecture.image_token_id if kind == "image" else architecture.video_token_id
        run = [token] * (rows * columns // architecture.vision.spatial_merge_size**2)
        for _ in range(frames):
            out.tokens += rng.choices(text, k=2) if kind == "video" else []
            out.tokens += [architecture.vision_start_token_id, *run]
            out.tokens += [architecture.vision_end_token_id]
    return out


def random_segments(rng: random.Random, merge: int = 2) -> list[Segment]:
    """Draw text around up to four images and videos of different shapes."""
    segments: list[Segment] = [rng.randint(1, 6)]
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(["image", "video"])
        frames = 1 if kind == "image" else rng.randint(1, 3)
        segments.append((kind, frames, merge * rng.randint(1, 5), merge * rng.randint(1, 5)))
        if rng.random() < 0.7:  # otherwise the next image follows at once
            segments.append(rng.randint(1, 9))
    return segments


def grids(samples: list[Sample], kind: str) -> Tensor | None:
    """Return the (n, 3) grids of all `samples`, in order."""
    rows = [grid for one in samples for grid in getattr(one, f"{kind}s")]
    return torch.tensor(rows) if rows else None


def pad(samples: list[Sample], side: str, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return (B, S) token ids and attention mask, padded on the ``left`` or ``right``."""
    width = max(len(one.tokens) for one in samples)
    ids = torch.full((len(samples), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(samples):
        n = len(one.tokens)
        place = slice(width - n, width) if side == "left" else slice(n)
        ids[row, place] = torch.tensor(one.tokens)
        mask[row, place] = 1
    return ids, mask
