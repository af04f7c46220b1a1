"""Micro-batches of images and videos, and random weights, in double precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

ARCHITECTURE = Architecture.from_hf(tiny_config())
SEQ = 64
# Double precision leaves room between rounding (2e-8 here) and any wrong wiring.
DTYPE = torch.float64


@contextmanager
def exact_rotary(tower: type[nn.Module] = Qwen3VLVisionModel) -> Iterator[None]:
    """Make HF's tower rotate without rounding to float32, by HF's function for the text model."""
    modeling = sys.modules[tower.__module__]
    exact = partial(modeling.apply_rotary_pos_emb, unsqueeze_dim=-2)
    with mock.patch.object(modeling, "apply_rotary_pos_emb_vision", exact):
        yield


@dataclass
class Batch:
    """One micro-batch; grids are (n, 3), in the order of their placeholders."""

    input_ids: Tensor  # (B, SEQ)
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None

    def visual(self) -> VisualInputs | None:
        return visual_inputs(ARCHITECTURE, **vars(self))


def batch(*samples: list[tuple[str, int, int, int]]) -> Batch:
    """Make a micro-batch; each sample is a list of (image | video, frames, rows, columns)."""
    token = {"image": ARCHITECTURE.image_token_id, "video": ARCHITECTURE.video_token_id}
    ids = torch.ones(len(samples), SEQ, dtype=torch.int64)
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for row, segments in enumerate(samples):
        at = 2 + row  # placeholders start elsewhere in every sample
        for kind, frames, height, width in segments:
            grids[kind].append([frames, height, width])
            for _ in range(frames):
                ids[row, at : at + height * width // 4] = token[kind]
                at += height * width // 4 + 1
        assert at <= SEQ, "the sample is too long"
    out = Batch(ids)
    if grids["image"]:
        out.image_grid_thw = torch.tensor(grids["image"])
        out.pixel_values = _pixels(out.image_grid_thw, seed=1)
    if grids["video"]:
        out.video_grid_thw = torch.tensor(grids["video"])
        out.pixel_values_videos = _pixels(out.video_grid_thw, seed=2)
    return out


def _pixels(grid: Tensor, seed: int) -> Tensor:
    return _random(int(grid.prod(1).sum()), ARCHITECTURE.vision.patch_dim, seed=seed)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def vision_weights() -> dict[str, Tensor]:
    """Return tensors by HF's names, all random, norms and biases too."""
    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**asdict(ARCHITECTURE.vision)))
    return {
        name: _random(*tensor.shape, seed=100 + i) * 0.3
        for i, (name, tensor) in enumerate(tower.state_dict().items())
    }
