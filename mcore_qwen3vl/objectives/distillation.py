"""How far a student's distribution is from a teacher's, token by token.

Both are given as the probabilities of the teacher's k likeliest tokens and of all other tokens
together, so they are distributions over k + 1 outcomes. Their divergence is at most that over the
whole vocabulary, by the data-processing inequality, and equals it if nothing is left over.

- ``forward``: KL(teacher || student);
- ``reverse``: KL(student || teacher);
- ``jsd``: generalised Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta)
  KL(student || m), with the mixture m = beta teacher + (1 - beta) student. Source: Agarwal et al.,
  "On-Policy Distillation of Language Models" (GKD), 2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_qwen3vl.objectives.settings import Distillation


def divergences(student: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Return the divergence at each token.

    Args:
        student: (..., k + 1) log-probabilities of the teacher's likeliest tokens and of the rest.
        teacher: the teacher's, without a gradient.

    Returns:
        (...), with a gradient for `student`. It is not multiplied by the squared temperature.
    """
    if settings.divergence == "forward":
        return _kl(teacher, student)
    if settings.divergence == "reverse":
        return _kl(student, teacher)
    beta = settings.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
