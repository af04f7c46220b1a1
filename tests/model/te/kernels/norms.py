"""RMSNorm and LayerNorm of ``transformer_engine_torch``, forward and backward.

They compute in float32, whatever the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.model.te.kernels.gemm import TORCH_DTYPE


def _scale(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.float() + 1 if zero_centered else gamma.float()


def _written(result: Tensor, out: Tensor | None, out_dtype: Any) -> Tensor:
    return result.to(TORCH_DTYPE[int(out_dtype)]) if out is None else out.copy_(result)


def rmsnorm_fwd(
    x: Tensor,
    gamma: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return the output, shaped like `x`, no mean, and one over the root mean square, (rows,)."""
    assert quantizer is None
    rsigma = torch.rsqrt(x.float().square().mean(-1) + eps)
    normed = x.float() * rsigma[:, None]
    return _written(normed * _scale(gamma, zero_centered), out, out_dtype), None, rsigma


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of gamma."""
    normed = x.float() * rsigma[:, None]
    scaled = grad.float() * _scale(gamma, zero_centered)
    back = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return back.to(x.dtype), (grad.float() * normed).sum(0).to(gamma.dtype)


def layernorm_fwd(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the mean and one over the standard deviation; the latter two (rows,)."""
    assert quantizer is None
    mean = x.float().mean(-1)
    rsigma = torch.rsqrt(x.float().var(-1, unbiased=False) + eps)
    normed = (x.float() - mean[:, None]) * rsigma[:, None]
    return _written(normed * _scale(gamma, zero_centered) + beta, out, out_dtype), mean, rsigma


def layernorm_bwd(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, of gamma and of beta."""
    normed = (x.float() - mean[:, None]) * rsigma[:, None]
    scaled = grad.float() * _scale(gamma, zero_centered)
    centred = scaled - scaled.mean(-1, keepdim=True)
    back = rsigma[:, None] * (centred - normed * (scaled * normed).mean(-1, keepdim=True))
    of_gamma, of_beta = (grad.float() * normed).sum(0), grad.float().sum(0)
    return back.to(x.dtype), of_gamma.to(gamma.dtype), of_beta.to(gamma.dtype)
