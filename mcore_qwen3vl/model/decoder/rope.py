"""Interleaved multimodal rotary embedding: from 3-D position ids to mcore's rotary angles.

Position ids are cut to the rank's tokens before they come here, and :class:`RotarySelfAttention`
turns queries and keys token by token where they are made. Nothing later needs to know which
positions a rank holds, so the same few lines serve CP, packing and both layer specs. mcore's own
packed path looks positions up again from cu_seqlens, with a device synchronisation in every layer,
and Transformer Engine's fused one counts from 0 in each sample, which is wrong for 3-D positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from mcore_qwen3vl.model.decoder.rotation import turn, turn_fused
from mcore_qwen3vl.model.remake import recipe_of, remember


class InterleavedMRoPE(nn.Module):
    """Angles for queries and keys; takes the place of mcore's ``MultimodalRotaryEmbedding``.

    The frequencies of the temporal, height and width axes alternate (t h w t h w … t t), where
    mcore's chunks them. Source: HF ``Qwen3VLTextRotaryEmbedding``.

    Args:
        head_dim: D.
        base: rotary base (``rope_theta``).
        section: how many of the D / 2 frequencies belong to time, height and width.
    """

    def __init__(self, head_dim: int, base: float, section: tuple[int, int, int]) -> None:
        super().__init__()
        # Plain attributes: a module cast to bf16 would take buffers with it. Made on the CPU, so
        # that a model built on the meta device still has values.
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        self.inverse_frequency = 1.0 / (base ** (steps / head_dim))  # (D / 2,)
        self.axis = torch.zeros(head_dim // 2, dtype=torch.int64, device="cpu")  # (D / 2,)
        for axis in (1, 2):
            self.axis[axis : section[axis] * 3 : 3] = axis

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """(3, B, S) integer positions -> (S, B, 1, D) float32 angles, in mcore's layout."""
        if self.axis.device != position_ids.device:
            self.axis = self.axis.to(position_ids.device)
            self.inverse_frequency = self.inverse_frequency.to(position_ids.device)
        positions = position_ids.float().index_select(0, self.axis)  # (D / 2, B, S)
        angles = positions.permute(2, 1, 0) * self.inverse_frequency  # (S, B, D / 2)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


def apply_rotary(x: Tensor, angles: Tensor, *, fused: bool) -> Tensor:
    """Turn queries or keys of one rank's tokens.

    Args:
        x: (s, B, heads, D).
        angles: (s, B, 1, D), of :class:`InterleavedMRoPE`. Their sines are taken once for all
            layers that are given this tensor, in the dtype of `x` as HF takes them.
        fused: by Transformer Engine's kernel.
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
    """mcore's attention that turns queries and keys as soon as they are projected."""

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
    turned, made = apply_rotary(x, angles, fused=fused), recipe_of(x)  # by the norm before
    if made is None:
        return turned
    return remember(turned, lambda: apply_rotary(made(), angles, fused=fused))
