"""The rotary embedding of queries and keys inside the output of the linear that made them.

PyTorch's operators make new queries and keys, and gather the three gradients in two steps. Kernels
of Liger-Kernel and Transformer Engine rotate queries and keys that are tensors of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl import kernels
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's


def fits(qkv: Tensor) -> bool:
    """Return whether the kernels take `qkv`."""
    return kernels.fits(qkv) and qkv.is_contiguous()


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys where they are; the values stay as they are.

    A pair of columns, i and i + D / 2, turns by one angle. All is computed in float32.

    Args:
        qkv: (n, 3, heads, D), bf16, fp16 or float32; contiguous; changed.
        cos, sin: (n, D / 2) float32, of which rows may be further apart.
    """
    if fits(qkv):
        _operators().rotate_qk(qkv[:, :2], cos, sin)
    else:
        rotate_in_place_eagerly(qkv[:, :2], cos, sin)


def rotary_gradient(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient (n, 3, heads, D) of what :func:`rotate_in_place` was given.

    Args:
        of_query, of_key, of_value: (n, heads, D), the gradients of its results.
        cos, sin: as there.
    """
    function = _operators().rotary_gradient if kernels.run_on(of_query) else rotary_gradient_eagerly
    gradient: Tensor = function(of_query, of_key, of_value, cos, sin)
    return gradient


def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import qkv_rotary_triton  # importing Triton takes a second

    return qkv_rotary_triton.OPERATORS


def rotate_in_place_eagerly(pair: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Do what :func:`rotate_in_place` does to `pair` (n, 2, heads, D), in nine kernels."""
    pair.copy_(_rotated(pair, cos[:, None, None], sin[:, None, None]))


def rotary_gradient_eagerly(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Do what :func:`rotary_gradient` does, in eleven kernels."""
    pair = torch.stack([of_query, of_key], 1)
    turned = _rotated(pair, cos[:, None, None], -sin[:, None, None])
    return torch.cat([turned, of_value[:, None]], 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned, -1).to(x.dtype)
