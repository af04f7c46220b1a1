"""The loss of answers that are labelled as wanted or unwanted (KTO).

Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, as TRL's
``KTOTrainer`` computes it. With the policy p, the reference p0, r = log p(y | x) - log p0(y | x) of
an answer y to a prompt x, and the baseline z, the loss is

- w (1 - sigmoid(beta (r - z))) of a wanted answer, with the weight w of wanted answers;
- u (1 - sigmoid(beta (z - r))) of an unwanted answer, with the weight u of unwanted answers.

The baseline estimates the KL divergence of the policy from the reference. It is the mean of r over
the batch with each prompt followed by another's answer, and at least 0. It has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.objectives.settings import Kto


def labelled_losses(
    log_probs: Tensor, reference: Tensor, desirable: Tensor, baseline: Tensor, kto: Kto
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each answer.

    Args:
        log_probs: (N,) float32, the policy's log-probabilities of the answers, summed over tokens.
        reference: (N,), the reference's log-probabilities, without a gradient.
        desirable: (N,) bool, whether an answer is wanted.
        baseline: scalar without a gradient, the mean of r for answers of other prompts.
        kto: the loss's settings.

    Returns:
        The losses (N,), and the rewards beta r (N,) without a gradient.
    """
    change = log_probs - reference
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    gap = change - baseline.clamp(min=0)
    losses = weight * (1 - torch.sigmoid(kto.beta * sign * gap))
    return losses, (kto.beta * change).detach()
