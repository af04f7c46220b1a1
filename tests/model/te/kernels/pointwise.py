"""SwiGLU and the rotary embedding of ``transformer_engine_torch``, forward and backward.

They compute in float32, whatever the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def swiglu(halves: Tensor, quantizer: Any) -> Tensor:
    """Multiply ``silu`` of the first half by the second half."""
    assert quantizer is None
    gate, up = halves.float().chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(halves.dtype)


def dswiglu(grad: Tensor, halves: Tensor, quantizer: Any) -> Tensor:
    """Return the gradients of both halves."""
    assert quantizer is None
    gate, up = halves.float().chunk(2, -1)
    sigmoid, grad = gate.sigmoid(), grad.float()
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((of_gate, grad * gate * sigmoid), -1).to(halves.dtype)


def fused_rope_forward(t: Tensor, freqs: Tensor, *arguments: Any) -> Tensor:
    """Rotate (s, B, heads, D) by (s, 1, 1, R) angles; values after the first R stay."""
    _only_plain(arguments)
    head, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    turned = head * freqs.cos() + _rotate_half(head) * freqs.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)


def fused_rope_backward(grad: Tensor, freqs: Tensor, *arguments: Any) -> Tensor:
    """Apply the transposed rotation, which reads the sine of the other half."""
    _only_plain(arguments)
    head, rest = grad[..., : freqs.shape[-1]].float(), grad[..., freqs.shape[-1] :]
    turned = head * freqs.cos() - _rotate_half(head * freqs.sin())
    return torch.cat((turned.to(grad.dtype), rest), -1)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _only_plain(arguments: tuple[Any, ...]) -> None:
    start, layout, interleaved, cu_seqlens, cp_size, _cp_rank = arguments
    assert (start, cu_seqlens, interleaved, cp_size) == (None, None, False, 1)
    assert layout.name.lower().endswith("sbhd")
