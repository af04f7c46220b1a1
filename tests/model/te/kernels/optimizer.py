"""Adam, the norm of many tensors and their scaling (``multi_tensor_*``)."""

from __future__ import annotations

import torch
from torch import Tensor

_ADAMW = 1


def multi_tensor_adam(
    chunk_size: int,
    noop: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Do one step; `tensors` are gradients, parameters, first moments and second moments."""
    gradients, parameters, first, second = tensors
    for g, p, m, v in zip(gradients, parameters, first, second, strict=True):
        if mode != _ADAMW:
            g = g + weight_decay * p
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        of_first = 1 - beta1**step if bias_correction else 1.0
        of_second = 1 - beta2**step if bias_correction else 1.0
        update = (m / of_first) / ((v / of_second).sqrt() + eps)
        if mode == _ADAMW:
            update = update + weight_decay * p
        p.sub_(lr * update)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, tensors: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of all values, (1,), and with `per_tensor` that of each, (tensors,)."""
    norms = torch.stack([tensor.norm() for tensor in tensors[0]])
    return norms.norm().reshape(1), norms if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, noop: Tensor, tensors: list[list[Tensor]], factor: float | Tensor
) -> None:
    """Write the first list times `factor` into the second."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * factor)
