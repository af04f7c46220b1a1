"""A teacher on the same ranks: one more forward pass per step, which keeps its likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.teacher import Top
from mcore_qwen3vl.model.head.module import Head
from mcore_qwen3vl.model.head.top_k import likeliest
from mcore_qwen3vl.training.step.forward import forward
from mcore_qwen3vl.training.step.two_passes import Within, two_passes


def with_teacher(
    within: Within,
    k: int,
    temperature: float,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first run the teacher.

    Args:
        within: gives the teacher.
        k: number of likeliest tokens to keep at each position.
        temperature: number that the logits are divided by.
    """
    first = partial(_step, partial(_likeliest, k=k, temperature=temperature))

    def use(batches: list[Batch], found: list[Top]) -> list[Batch]:
        return [replace(batch, teacher=top) for batch, top in zip(batches, found, strict=True)]

    return two_passes(original(*args, **kwargs), first=first, use=use, within=within)


def _step(
    processor: Callable[..., Tensor], batches: Iterator[Batch], model: Any
) -> tuple[Tensor, Callable[..., Top]]:
    output, _ = forward(next(batches), model, output_processor=processor)
    return output, _top


def _likeliest(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    k: int,
    temperature: float,
    **_: Any,
) -> Tensor:
    """Compute (B, s, 2 k + 1) float32: k ids, their log-probabilities and that of the rest."""
    ids, log_probs = output_layer(
        hidden_states, output_weight, reduce=partial(likeliest, k=k, temperature=temperature)
    )
    return torch.cat([ids.float(), log_probs], -1)  # Megatron passes one tensor on


def _top(output: Tensor, *, non_loss_data: bool) -> Top:
    k = output.shape[-1] // 2
    return Top(output[..., :k].int(), output[..., k:])
