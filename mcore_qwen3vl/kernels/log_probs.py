"""What tokens' log-probabilities need of a chunk of logits (n, V): a reduction, and the gradient.

Liger-Kernel's fused linear cross entropy forms its gradient when the loss is computed. So it does
not serve objectives of log-probabilities, whose gradients are known later. It does not serve
entropies either, nor columns divided over TP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.kernels import fits
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's


def reduce_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    sums: Tensor,
    entropy: bool,
) -> None:
    """Reduce logits to the numbers of their softmax, relative to their maximum.

    Args:
        logits: (n, V), bf16, fp16 or float32; rows are contiguous.
        targets: (n,) int64 in [0, V).
        temperature: divides the logits.
        maximum: (n,) float32, written: the largest logit.
        sums: (3, n) float32, written: the sum of the exponentials, the target's logit, which is not
            relative, and with `entropy` the sum of the logits weighted by the exponentials.
        entropy: whether the third is written.
    """
    if fits(logits):
        _operators().reduce_logits(logits, targets, temperature, maximum, sums, entropy)
    else:
        reduce_logits_eagerly(logits, targets, temperature, maximum, sums, entropy)


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    total: Tensor,
    of_log_probs: Tensor,
    of_target: Tensor,
    of_entropies: Tensor | None = None,
    entropies: Tensor | None = None,
) -> None:
    """Write the gradient of the logits over them: with p = exp(logits / temperature - total),

    ``-of_log_probs * p``, and ``of_target`` more at the target, and with entropies
    ``-of_entropies * p * (logits / temperature - total + entropies)`` more. It is computed in
    float32 and rounded once.

    Args:
        logits, targets, temperature: as for :func:`reduce_logits`; the logits are overwritten.
        total: (n,) float32, such as the logsumexp.
        of_log_probs, of_target, of_entropies: (n,) float32, divided by the temperature.
        entropies: (n,) float32.
    """
    numbers = (total, of_log_probs, of_target, of_entropies, entropies)
    if fits(logits):
        _operators().write_gradient(logits, targets, temperature, *numbers)
    else:
        write_gradient_eagerly(logits, targets, temperature, *numbers)


def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import log_probs_triton  # importing Triton takes a second

    return log_probs_triton.OPERATORS


def reduce_logits_eagerly(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    sums: Tensor,
    entropy: bool,
) -> None:
    """Do what :func:`reduce_logits` does, in seven kernels or more."""
    logits = _widen(logits, temperature)
    maximum.copy_(logits.amax(-1))
    sums[1] = logits.gather(1, targets[:, None]).squeeze(1)
    shifted = logits.sub_(maximum[:, None])
    if not entropy:
        sums[0] = shifted.exp_().sum(-1)
        return
    weights = shifted.exp()
    sums[0] = weights.sum(-1)
    sums[2] = weights.mul_(shifted).sum(-1)


def write_gradient_eagerly(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    total: Tensor,
    of_log_probs: Tensor,
    of_target: Tensor,
    of_entropies: Tensor | None = None,
    entropies: Tensor | None = None,
) -> None:
    """Do what :func:`write_gradient` does, in seven kernels or more."""
    gradient, factor = _widen(logits, temperature), -of_log_probs[:, None]
    if of_entropies is not None and entropies is not None:
        offset = (entropies - total)[:, None]
        factor = factor - (gradient + offset).mul_(of_entropies[:, None])
    gradient.sub_(total[:, None]).exp_().mul_(factor)
    gradient.scatter_add_(1, targets[:, None], of_target[:, None])
    logits.copy_(gradient)


def _widen(logits: Tensor, temperature: float) -> Tensor:
    """Return a copy in float32, divided by the temperature."""
    wide = logits.to(torch.float32, copy=True)
    return wide if temperature == 1 else wide.div_(temperature)
