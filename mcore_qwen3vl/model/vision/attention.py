"""Attention inside each frame, registered with Hugging Face's attention interface."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# HF's vision attention hands the whole batch with its cu_seqlens, instead of splitting it by
# numbers read from the device, to implementations that have "flash" in their name.
FRAME_ATTENTION = "frame_flash_or_sdpa"


def frame_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    frame_patches: tuple[int, ...],
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Full attention within each frame, none between frames.

    The variable-length kernel where it exists (CUDA, half precision); otherwise SDPA frame by
    frame, split by lengths that are known on the host.

    Args:
        module: unused, HF's convention.
        query, key, value: (1, heads, P, head_dim); scaled by 1 / sqrt(head_dim).
        attention_mask: unused, HF's convention.
        frame_patches: patches of each frame, F numbers that add up to P.
        cu_seq_lens_q: (F + 1,) int32, the same as boundaries.

    Returns:
        (1, P, heads, head_dim), and None for the attention weights.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (P, heads, d)
        # Not HF's maximum, which before transformers 5.15 is a number on the device.
        longest = max(frame_patches)
        attended = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest)
        assert isinstance(attended, Tensor)  # no auxiliary output was asked for
        return attended.unsqueeze(0), None
    frames = zip(*(t.split(frame_patches, dim=2) for t in (query, key, value)), strict=True)
    parts = [F.scaled_dot_product_attention(*frame) for frame in frames]  # (1, heads, p, d)
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(FRAME_ATTENTION, frame_attention)
