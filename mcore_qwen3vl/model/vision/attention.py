"""The tower's attention: within each frame, with a rotary embedding that takes few kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from mcore_qwen3vl.model.decoder.rope import turn, turn_fused


class FrameAttention(Qwen3VLVisionAttention):
    """HF's attention, with one rotary embedding for queries and keys that keeps no inputs.

    Attributes:
        fused: whether to rotate with Transformer Engine's kernel.
    """

    fused = False

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        frame_patches: tuple[int, ...],
        **_: Any,
    ) -> Tensor:
        """Attend within each frame: (P, hidden) -> (P, hidden).

        Args:
            position_embeddings: cosines and sines, (P, head_dim) float32.
            cu_seqlens: (F + 1,) int32 boundaries of the frames.
            frame_patches: number of patches in each of F frames; the sum is P.
        """
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        pair, value = qkv.split((2, 1), dim=1)
        cos, sin = position_embeddings
        if self.fused:
            if not hasattr(cos, "angles"):  # once for all blocks
                cos.angles = torch.atan2(sin, cos)[:, None, None]  # type: ignore[attr-defined]
            turned = turn_fused(pair, cos.angles)  # type: ignore[attr-defined]
        else:  # in float32, as HF does
            half = cos.shape[-1] // 2
            turned = turn(pair, cos[:, None, None, :half], sin[:, None, None, :half])
        query, key = turned.unbind(1)
        # A copy, because a view of `qkv` would keep all of it for the backward pass.
        value = value.squeeze(1).contiguous()
        return self.proj(attend(query, key, value, cu_seqlens, frame_patches).flatten(1))


def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, frame_patches: tuple[int, ...]
) -> Tensor:
    """Compute full attention within each frame: (P, heads, head_dim) each, scaled as usual.

    Uses the variable-length kernel where it exists (CUDA, half precision), otherwise SDPA frame by
    frame, with lengths that are known on the host. The frames are those of :class:`FrameAttention`.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        longest = max(frame_patches)
        attended = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
        assert isinstance(attended, Tensor)  # no auxiliary output was asked for
        return attended
    tensors = (t.transpose(0, 1).split(frame_patches, dim=1) for t in (query, key, value))
    parts = [F.scaled_dot_product_attention(*frame) for frame in zip(*tensors, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)
