"""Masking of the head's columns that only pad the vocabulary to a divisible size.

Megatron's cross entropy normalises over all columns, padding included, so that its value and its
gradients would depend on ``--make-vocab-size-divisible-by``. Hugging Face has no such columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_columns(logits: Tensor, columns: int) -> Tensor:
    """Give the columns after the first `columns` the logit -inf and no gradient, in place.

    Losses, samples and gradients are then those of the unpadded head, exactly.
    """
    return logits if columns >= logits.shape[-1] else _Mask.apply(logits, columns)


class _Mask(torch.autograd.Function):
    """Masks in place, forward and backward, because the logits are the largest tensor of all."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: int) -> Tensor:
        ctx.columns = columns
        ctx.mark_dirty(logits)
        logits[..., columns:] = -torch.inf
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient[..., ctx.columns :] = 0
        return gradient, None
