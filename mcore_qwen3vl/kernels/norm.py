"""RMSNorm and LayerNorm, forward and backward, with the residual's addition beside them.

PyTorch's RMSNorm runs two to four kernels in the backward pass. It has no weights as differences
from one, and copies an input whose rows are part of a larger tensor. Liger-Kernel's takes
contiguous rows alone, and adds a residual's gradient only where it has added the residual. It is no
operator of PyTorch, by which a rehearsal counts bytes. Transformer Engine's norms are those of the
``te`` spec.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl import kernels
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's

WIDEST = 16_384
"""Values of the longest row that a program holds in its registers."""


def fits(x: Tensor) -> bool:
    """Return whether the kernels normalise the last axis of `x`."""
    return kernels.fits(x) and 0 < x.shape[-1] <= WIDEST and x.stride(-1) == 1


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise rows: RMSNorm, or with a bias LayerNorm. All is computed in float32.

    Args:
        x: (..., C), bf16, fp16 or float32.
        weight, bias: (C,), of any of these dtypes.
        offset: is added to the weight.
        added: (..., C), is added to `x` first; the sum is rounded to the dtype of `x`.

    Returns:
        The norm (..., C), rounded once; (1, rows) float32 reciprocals of the root mean squares, or
        (2, rows) with the means before them; and the sum, None without `added`.
    """
    function = _operators().normalise if fits(x) else normalise_eagerly
    normed, statistics, total = function(x, weight, bias, eps, offset, added)
    return normed, statistics, None if added is None else total


def norm_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    offset: float = 0.0,
    of_x: Tensor | None = None,
    of_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the rows, of the weight, and with LayerNorm of the bias.

    Args:
        gradient: (..., C), that of the norm.
        x: (..., C), what was normalised: the sum, if something was added.
        weight, statistics, offset: as for :func:`normalise` and as it returned them.
        of_x: (..., C), a gradient that the rows have besides, such as the residual's.
        of_parameters: whether the others are computed, in the weight's dtype.
    """
    function = _operators().norm_gradients if fits(x) else norm_gradients_eagerly
    rows, of_weight, of_bias = function(
        gradient, x, weight, statistics, offset, of_x, of_parameters
    )
    if not of_parameters:
        return rows, None, None
    return rows, of_weight, of_bias if len(statistics) == 2 else None


def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import norm_triton  # importing Triton takes a second

    return norm_triton.OPERATORS


def normalise_eagerly(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what :func:`normalise` does; without `added` the sum is empty."""
    total = x.new_empty(0) if added is None else x + added
    wide = _widen(x if added is None else total).flatten(0, -2)
    means = wide.mean(-1, keepdim=True)
    if bias is not None:
        wide = wide - means
    scales = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = wide * scales * (_widen(weight) + offset)
    if bias is not None:
        normed = normed + _widen(bias)
    statistics = scales if bias is None else torch.cat([means, scales], 1)
    return normed.to(x.dtype).view(x.shape), statistics.t().contiguous(), total


def norm_gradients_eagerly(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    offset: float,
    of_x: Tensor | None,
    of_parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what :func:`norm_gradients` does; what is not computed is empty."""
    wide, scales = _widen(x).flatten(0, -2), statistics[-1, :, None]
    if len(statistics) == 2:
        wide = wide - statistics[0, :, None]
    normed, arriving = wide * scales, _widen(gradient).reshape(wide.shape)
    weighted = arriving * (_widen(weight) + offset)
    rows = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
    if len(statistics) == 2:
        rows = rows - weighted.mean(-1, keepdim=True)
    rows = rows * scales
    if of_x is not None:
        rows = rows + _widen(of_x).reshape(rows.shape)
    empty = weight.new_empty(0)
    of_weight = (arriving * normed).sum(0).to(weight.dtype) if of_parameters else empty
    of_bias = arriving.sum(0).to(weight.dtype) if of_parameters else empty
    return rows.to(x.dtype).view(x.shape), of_weight, of_bias


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
