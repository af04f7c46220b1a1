"""Interleaved multimodal rotary embedding: from 3-D position ids to mcore's rotary angles.

Position ids are reduced to the rank's tokens before they come here, and
:class:`RotarySelfAttention` rotates queries and keys token by token as soon as they are projected.
Nothing later needs to know which positions a rank holds, so the same few lines serve CP, packing
and both layer specs. mcore's own packed path looks positions up again from cu_seqlens, with a host
sync in every layer. Transformer Engine's fused path counts from 0 in each sample, which is wrong
for 3-D positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.decoder.rotation import turn, turn_fused
from mcore_qwen3vl.model.recompute import recipe_of, remember


def rope_frequencies(
    architecture: Architecture, rope_theta: float | None = None
) -> tuple[Tensor, float]:
    """Compute a model's rotary frequencies with HF's own class, on the CPU.

    Args:
        architecture: the model's shape.
        rope_theta: another base than the model's.

    Returns:
        The inverse frequencies, (D / 2,) float32, and the factor by which a scaled rope such as
        YaRN multiplies cosines and sines.
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

    Args:
        architecture: the model's shape.
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
    turned, made = apply_rotary(x, angles, fused=fused), recipe_of(x)  # of the norm before
    if made is None:
        return turned
    return remember(turned, lambda: apply_rotary(made(), angles, fused=fused))
