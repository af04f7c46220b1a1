"""Columns of the head that only pad the vocabulary to a size that divides.

Megatron's cross entropy normalises over all columns, padding included, so that its value and its
gradients would depend on ``--make-vocab-size-divisible-by``. Hugging Face has no such columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_padded_vocabulary(output_layer: Any, vocab_size: int) -> None:
    """Let `output_layer` give every padded column the logit -inf; does nothing without padding.

    Losses, samples and gradients are then those of the unpadded head, exactly.

    Args:
        output_layer: Megatron's ``ColumnParallelLinear``, this TP rank's part of the head.
        vocab_size: columns of the model's own vocabulary, over all ranks.
    """
    columns = output_layer.output_size_per_partition
    if output_layer.output_size <= vocab_size:
        return
    first = output_layer.tp_group.rank() * columns

    def mask(module: Any, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        gathered = logits.shape[-1] == module.output_size  # by runtime_gather_output
        own = vocab_size if gathered else max(vocab_size - first, 0)
        if own >= logits.shape[-1]:
            return output
        return _Mask.apply(logits, own), bias

    output_layer.register_forward_hook(mask)


class _Mask(torch.autograd.Function):
    """In place, forwards and backwards: the logits are the largest tensor of all."""

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
