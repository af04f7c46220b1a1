"""A simulation on the CPU of an NVIDIA GPU's float32 products where TF32 is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_LOST = 13  # bits of float32's 23 bits of mantissa


def rounded(x: Any) -> Any:
    """Round float32 to the nearest value with TF32's ten bits of mantissa."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32) + (1 << (_LOST - 1))
    return (bits >> _LOST << _LOST).view(torch.float32)


class TF32(TorchDispatchMode):
    """A mode that rounds the factors of products where PyTorch's settings let a GPU do so."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        products = packet in _PRODUCTS and torch.get_float32_matmul_precision() != "highest"
        if products or (packet in _CONVOLUTIONS and torch.backends.cudnn.allow_tf32):
            args = tuple(map(rounded, args))
        return func(*args, **(kwargs or {}))
