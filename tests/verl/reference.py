"""Hugging Face's own numbers for the samples, one sample at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mcore_qwen3vl.config import Architecture
from tests.verl.samples import TEMPERATURE, Sample, advantages


@dataclass(frozen=True)
class Expected:
    """Numbers by sample: next tokens' log-probabilities (s - 1,), entropies (s,), hidden (s, H).

    Attributes:
        grad_norm: gradient norm of VERL's vanilla PPO loss at ratio one, a mean over the tokens of
            responses.
        frozen_norm: the same norm without the gradients of the vision tower and its mergers.
    """

    log_probs: list[Tensor]
    entropies: list[Tensor]
    hidden: list[Tensor]
    grad_norm: float
    frozen_norm: float


def of(path: Path, samples: list[Sample], dtype: torch.dtype = torch.float32) -> Expected:
    """Run the model in `dtype`, forward and backward."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    architecture = Architecture.from_hf(path)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    tokens = sum(len(s.response) for s in samples)
    for sample, advantage in zip(samples, advantages(samples), strict=True):
        ids = sample.ids[None]
        out = model(
            input_ids=ids,
            mm_token_type_ids=_kinds(ids, architecture),
            output_hidden_states=True,
            **sample.media,
        )
        scores = (out.logits[0].float() / TEMPERATURE).log_softmax(-1)
        log_probs = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        response = log_probs[-len(sample.response) :]
        ratio = (response - response.detach()).exp()
        (-(advantage[: len(response)] * ratio).sum() / tokens).backward()
        entropies = -(scores.exp() * scores).sum(-1)
        found.append((log_probs.detach(), entropies.detach(), out.hidden_states[-1][0].detach()))
    log_probs, entropies, hidden = (list(part) for part in zip(*found, strict=True))
    return Expected(log_probs, entropies, hidden, _norm(model, ""), _norm(model, "visual."))


def _kinds(ids: Tensor, a: Architecture) -> Tensor:
    """Return the kind of each token: 0 for text, 1 for images, 2 for videos."""
    return (ids == a.image_token_id).int() + 2 * (ids == a.video_token_id).int()


def _norm(model: Any, without: str) -> float:
    squares = (
        float(p.grad.square().sum())
        for name, p in model.named_parameters()
        if p.grad is not None and not (without and without in name)
    )
    return math.sqrt(sum(squares))
