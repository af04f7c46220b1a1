"""Micro-batches of images and videos, and random weights, in double precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config
from tests.model.samples import Media, MicroBatch, padded, sample

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


def batch(*media: list[Media]) -> MicroBatch:
    """Make a micro-batch of samples with these images and videos, in double precision."""
    samples = [sample(ARCHITECTURE, SEQ, one, seed) for seed, one in enumerate(media)]
    made = padded(ARCHITECTURE, samples, SEQ)
    assert made.visual is not None
    pixels = made.visual.pixel_values.to(DTYPE)
    return replace(made, visual=replace(made.visual, pixel_values=pixels))


def vision_weights() -> dict[str, Tensor]:
    """Return tensors by HF's names, all random, norms and biases too."""
    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**asdict(ARCHITECTURE.vision)))
    draw = torch.Generator().manual_seed(100)
    return {
        name: torch.randn(tensor.shape, generator=draw, dtype=DTYPE) * 0.3
        for name, tensor in tower.state_dict().items()
    }
