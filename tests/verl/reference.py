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


def of(path: Path, samples: list[Sample]) -> Expected:
    """Run the model in float32, forward and backward."""
    model, architecture = _load(path, torch.float32), Architecture.from_hf(path)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    tokens = sum(len(s.response) for s in samples)
    for sample, advantage in zip(samples, advantages(samples), strict=True):
        out = _run(model, architecture, sample)
        scores, log_probs = _scores(out, sample)
        response = log_probs[-len(sample.response) :]
        ratio = (response - response.detach()).exp()
        (-(advantage[: len(response)] * ratio).sum() / tokens).backward()
        entropies = -(scores.exp() * scores).sum(-1)
        found.append((log_probs.detach(), entropies.detach(), out.hidden_states[-1][0].detach()))
    log_probs, entropies, hidden = (list(part) for part in zip(*found, strict=True))
    return Expected(log_probs, entropies, hidden, _norm(model, ""), _norm(model, "visual."))


@torch.no_grad()
def log_probs_in_bfloat16(path: Path, samples: list[Sample]) -> list[Tensor]:
    model, architecture = _load(path, torch.bfloat16), Architecture.from_hf(path)
    return [_scores(_run(model, architecture, sample), sample)[1] for sample in samples]


def _load(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )


def _run(model: Any, architecture: Architecture, sample: Sample) -> Any:
    ids = sample.ids[None]
    return model(
        input_ids=ids,
        mm_token_type_ids=_kinds(ids, architecture),
        output_hidden_states=True,
        **sample.media,
    )


def _scores(out: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all tokens (s, V), and of the next ones (s - 1,)."""
    scores = (out.logits[0].float() / TEMPERATURE).log_softmax(-1)
    return scores, scores[:-1].gather(1, sample.ids[1:, None])[:, 0]


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
