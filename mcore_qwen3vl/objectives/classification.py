"""The losses of classifiers, as HF's ``ForSequenceClassificationLoss`` computes them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def classification_losses(
    logits: Tensor, right: Tensor, *, is_single: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each record.

    Args:
        logits: (N, labels) float32.
        right: (N, labels) float32, 1 for labels that are right and 0 for others.
        is_single: whether one label is right, so that they exclude one another: cross entropy.
            Otherwise each label is judged by itself: the mean of their binary cross entropies.

    Returns:
        Losses (N,) float32, with a gradient for `logits`; and for each 1.0 if all its labels are
        predicted right, else 0.0.
    """
    if is_single:
        losses = F.cross_entropy(logits, right, reduction="none")
        return losses, (logits.argmax(1) == right.argmax(1)).float()
    losses = F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
    return losses, ((logits > 0) == (right > 0)).all(1).float()
