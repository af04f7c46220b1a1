"""Rotary embedding in few kernels: one of Transformer Engine's, or three or four of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.model.pointwise import Pointwise


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys, keeping only the tables for the backward pass.

    Source: HF ``apply_rotary_pos_emb`` of Qwen3-VL: the halves of D are the coordinates.

    Args:
        x: (S, B, heads, D).
        cos, sin: (S, B or 1, 1, D / 2), in the dtype to compute in.

    Returns:
        Shape and dtype of `x`.
    """
    turned: Tensor = _Turn.apply(x, cos, sin)
    return turned


def turn_fused(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate with Transformer Engine's kernel, which computes in float32.

    Args:
        x: (S, B, heads, D).
        angles: (S, B or 1, 1, D) float32, the second half of D like the first.

    Returns:
        Shape and dtype of `x`.
    """
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    if angles.shape[1] == 1:
        return fused_apply_rotary_pos_emb(x, angles)
    # The kernel takes one row of angles for the whole batch, so each token becomes a position.
    tokens, of_tokens = x.flatten(0, 1).unsqueeze(1), angles.flatten(0, 1).unsqueeze(1)
    return fused_apply_rotary_pos_emb(tokens, of_tokens).view(x.shape)


class _Turn(torch.autograd.Function):
    """Rotates; the backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1), None, None


@Pointwise
def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    halves = x.unflatten(-1, (2, -1))  # (S, B, heads, 2, D / 2)
    first, second = halves.unbind(-2)
    turned = halves * cos.unsqueeze(-2)
    turned.select(-2, 0).addcmul_(second, sin, value=-sign)
    turned.select(-2, 1).addcmul_(first, sin, value=sign)
    return turned.flatten(-2).to(x.dtype)
