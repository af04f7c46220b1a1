"""Hugging Face's logits, loss and gradients, from one unpadded sample at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.model.samples import Sample


@dataclass
class Expected:
    """Results for some samples; the loss is the mean over the tokens that the loss mask keeps."""

    logits: list[Tensor]  # of each sample (S, V)
    tokens: float
    loss: float
    gradients: dict[str, Tensor]


@dataclass
class Reference:
    path: Path
    architecture: Architecture
    model: Any

    @property
    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters()}

    def expect(self, samples: list[Sample]) -> Expected:
        self.model.zero_grad()
        tokens = sum(float(s.loss_mask.sum()) for s in samples)
        total, logits = 0.0, []
        for s in samples:
            output = self.model(
                input_ids=s.input_ids,
                position_ids=s.position_ids,
                attention_mask=torch.ones_like(s.input_ids),
                **s.media,
            ).logits
            losses = F.cross_entropy(output[0], s.labels[0], reduction="none")
            loss = (losses * s.loss_mask[0]).sum() / tokens
            loss.backward()
            total += float(loss)
            logits.append(output[0].detach())
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }
        return Expected(logits, tokens, total, gradients)


def load(path: Path, **options: Any) -> Reference:
    write_tiny_checkpoint(path, **options)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.config._attn_implementation = "sdpa"
    return Reference(path, Architecture.from_hf(path), model.train())
