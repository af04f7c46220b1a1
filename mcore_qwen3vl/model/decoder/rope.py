"""Interleaved multimodal rotary embedding: from 3-D position ids to rotated queries and keys.

Position ids are reduced to the rank's tokens before they come here, and
:class:`RotarySelfAttention` rotates queries and keys token by token as soon as they are projected.
Nothing later needs to know which positions a rank holds, so the same few lines serve CP, packing
and both layer specs. mcore's own packed path looks positions up again from cu_seqlens, with a host
sync in every layer. Transformer Engine's fused path counts from 0 in each sample, which is wrong
for 3-D positions.

A rotation is one kernel of Transformer Engine's, or three or four of torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.pointwise import Pointwise
from mcore_qwen3vl.model.recompute import recipe_of, remember


def rope_frequencies(
    architecture: Architecture, rope_theta: float | None = None
) -> tuple[Tensor, float]:
    """Compute a model's rotary frequencies with HF's own class, or those of another base.

    Returns:
        The inverse frequencies, (D / 2,) float32 on the CPU, and the factor by which a scaled rope
        such as YaRN multiplies cosines and sines.
    """
    config = Qwen3VLTextConfig(
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            **dict(architecture.rope_scaling),
            "rope_theta": rope_theta or architecture.rope_theta,
        },
    )
    with torch.device("cpu"):  # a model built on the meta device still needs the values
        rope = Qwen3VLTextRotaryEmbedding(config)
    return rope.inv_freq.detach().clone(), float(rope.attention_scaling)


class InterleavedMRoPE(nn.Module):
    """Rotary angles for queries and keys; replaces mcore's ``MultimodalRotaryEmbedding``.

    The frequencies of the temporal, height and width axes alternate (t h w t h w … t t); in mcore's
    each axis has a contiguous chunk. Source: HF ``Qwen3VLTextRotaryEmbedding``.

    Attention's softmax scale applies the factor of a scaled rope, see :func:`transformer_config`.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        # Plain attributes, because casting the module to bf16 would cast buffers too. Created on
        # the CPU, so that a model built on the meta device still has values.
        self.inverse_frequency, self.attention_scaling = rope_frequencies(architecture)
        self.axis = torch.zeros(len(self.inverse_frequency), dtype=torch.int64, device="cpu")
        for axis in (1, 2):
            self.axis[axis : architecture.mrope_section[axis] * 3 : 3] = axis

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute (S, B, 1, D) float32 angles in mcore's layout of (3, B, S) integer positions."""
        if self.axis.device != position_ids.device:
            self.axis = self.axis.to(position_ids.device)
            self.inverse_frequency = self.inverse_frequency.to(position_ids.device)
        positions = position_ids.float().index_select(0, self.axis)  # (D / 2, B, S)
        angles = positions.permute(2, 1, 0) * self.inverse_frequency  # (S, B, D / 2)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


def apply_rotary(x: Tensor, angles: Tensor, *, fused: bool) -> Tensor:
    """Rotate queries or keys of one rank's tokens.

    Args:
        x: (s, B, heads, D).
        angles: (s, B, 1, D), from :class:`InterleavedMRoPE`. Their sines and cosines are computed
            once for all layers that receive this tensor, and rounded to the dtype of `x` as in HF.
        fused: whether to use Transformer Engine's kernel.
    """
    if fused:
        return turn_fused(x, angles)
    tables = getattr(angles, "tables", None)
    if tables is None:
        half = angles[..., : angles.shape[-1] // 2]
        tables = half.cos().to(x.dtype), half.sin().to(x.dtype)
        angles.tables = tables  # type: ignore[attr-defined]
    return turn(x, *tables)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (S, B, heads, D), keeping only the tables for the backward pass.

    The tables are (S, B or 1, 1, D / 2), in the dtype to compute in. Source: HF
    ``apply_rotary_pos_emb`` of Qwen3-VL: the halves of D are the coordinates.
    """
    turned: Tensor = _Turn.apply(x, cos, sin)
    return turned


def turn_fused(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (S, B, heads, D) with Transformer Engine's kernel, which computes in float32.

    The angles are (S, B or 1, 1, D) float32, the second half of D like the first.
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
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1), None, None


@Pointwise
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    halves = x.unflatten(-1, (2, -1))  # (S, B, heads, 2, D / 2)
    first, second = halves.unbind(-2)
    turned = halves * cos.unsqueeze(-2)
    turned.select(-2, 0).addcmul_(second, sin, value=-sign)
    turned.select(-2, 1).addcmul_(first, sin, value=sign)
    return turned.flatten(-2).to(x.dtype)


class RotarySelfAttention(SelfAttention):
    """mcore's attention, which here rotates queries and keys as soon as they are projected."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        self._angles = rotary_pos_emb
        try:
            return super().forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._angles is not None:
            fused = self.config.transformer_impl == "transformer_engine"
            query, key = (_turned(x, self._angles, fused) for x in (query, key))
        return query, key, *rest


def _turned(x: Tensor, angles: Tensor, fused: bool) -> Tensor:
    """Rotate the output of a norm, and give the result a recipe that begins with the norm's."""
    turned, recipe = apply_rotary(x, angles, fused=fused), recipe_of(x)
    if recipe is None:
        return turned
    return remember(turned, lambda: apply_rotary(recipe(), angles, fused=fused))
