"""Losses as pure functions: of preferences, and of a student.

Other losses of single tokens, such as cross entropy, are in `mcore_qwen3vl.training.forward_step`.

Preferences
-----------

The losses over pairs of a chosen and a rejected answer are DPO and its relatives, SimPO and ORPO.
Source: Rafailov et al., "Direct Preference Optimization", 2023. With the policy p, the reference p0
and s = (log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected)), the losses are:

- ``sigmoid``: -log sigmoid(beta s); smoothed, Mitchell's "A note on DPO with noisy preferences",
  2023: -(1 - e) log sigmoid(beta s) - e log sigmoid(-beta s).
- ``hinge``: max(0, 1 - beta s). Zhao et al., "SLiC-HF", 2023, as Liu et al., "RSO",
  2023, normalise it.
- ``ipo``: (s - 1 / (2 beta))^2, where s has mean log-probabilities over an answer's tokens. Azar et
  al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023; the
  mean is as in TRL, on the authors' advice.

Two losses have no reference. With m, the mean log-probability of an answer's tokens, they are:

- ``simpo``: -log sigmoid(beta (m(chosen) - m(rejected)) - gamma). Meng et al., "SimPO", 2024.
- ``orpo``: -beta log sigmoid(o(chosen) - o(rejected)) with the log-odds o = m - log(1 - exp(m)).
  Hong et al., "ORPO", 2024, who add the loss of the chosen answer with weight 1.

To each of them, alpha times the chosen answer's mean negative log-likelihood over its tokens can be
added. Pang et al., "Iterative Reasoning Preference Optimization", 2024.

KTO has answers that are labelled as wanted or unwanted. Source: Ethayarajh et al., "KTO: Model
Alignment as Prospect Theoretic Optimization", 2024, as TRL's ``KTOTrainer`` computes it. With
r = log p(y | x) - log p0(y | x) of an answer y to a prompt x, and the baseline z, the loss is

- w (1 - sigmoid(beta (r - z))) of a wanted answer, with the weight w of wanted answers;
- u (1 - sigmoid(beta (z - r))) of an unwanted answer, with the weight u of unwanted answers.

The baseline estimates the KL divergence of the policy from the reference. It is the mean of r over
the batch with each prompt followed by another's answer, and at least 0. It has no gradient.

Distillation
------------

A divergence says how far a student's distribution is from a teacher's at a token. Both are given as
the probabilities of the teacher's k likeliest tokens and of all other tokens together, so they are
distributions over k + 1 outcomes. Their divergence is at most that over the whole vocabulary, by
the data-processing inequality, and equals it if nothing is left over.

- ``forward``: KL(teacher || student);
- ``reverse``: KL(student || teacher);
- ``jsd``: generalised Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta)
  KL(student || m), with the mixture m = beta teacher + (1 - beta) student. Source: Agarwal et al.,
  "On-Policy Distillation of Language Models" (GKD), 2024.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.objectives.settings import Distillation, Kto, Preference


def pair_losses(
    log_probs: Tensor, reference: Tensor | None, lengths: Tensor, preference: Preference
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each pair.

    Args:
        log_probs: (P, 2) float32, the policy's log-probabilities of the chosen and the rejected
            answer, summed over tokens.
        reference: (P, 2), the reference's log-probabilities, without a gradient; None for a loss
            without a reference.
        lengths: (P, 2), the answers' numbers of tokens.

    Returns:
        The losses (P,), and the rewards (P, 2) without a gradient, float32: beta (log p - log p0),
        or without a reference beta m.
    """
    change = log_probs / lengths if reference is None else log_probs - reference
    rewards = (preference.beta * change).detach()
    if preference.kind == "ipo":
        change = change / lengths
    elif preference.kind == "orpo":
        change = _log_odds(change)
    gap = change[:, 0] - change[:, 1]
    if preference.kind in ("sigmoid", "simpo"):
        wrong, scaled = preference.label_smoothing, preference.beta * gap - preference.gamma
        losses = -(1 - wrong) * F.logsigmoid(scaled)
        if wrong:
            losses = losses - wrong * F.logsigmoid(-scaled)
    elif preference.kind == "orpo":
        losses = -preference.beta * F.logsigmoid(gap)
    elif preference.kind == "hinge":
        losses = F.relu(1 - preference.beta * gap)
    else:
        losses = (gap - 1 / (2 * preference.beta)).square()
    if preference.rpo_alpha:
        losses = losses - preference.rpo_alpha * log_probs[:, 0] / lengths[:, 0]
    return losses, rewards


def _log_odds(means: Tensor) -> Tensor:
    """Return log(p / (1 - p)) with a finite gradient, where `means` is log p <= 0.

    The two forms of log(1 - p) are exact on either side of p = 1/2.
    """
    means = means.clamp(max=-torch.finfo(means.dtype).eps)  # p is 1 to rounding
    low, high = torch.log1p(-means.exp()), torch.log(-torch.expm1(means))
    return means - torch.where(means < -math.log(2), low, high)


def labelled_losses(
    log_probs: Tensor, reference: Tensor, desirable: Tensor, baseline: Tensor, kto: Kto
) -> tuple[Tensor, Tensor]:
    """Compute KTO's loss of each answer.

    Args:
        log_probs: (N,) float32, the policy's log-probabilities of the answers, summed over tokens.
        reference: (N,), the reference's log-probabilities, without a gradient.
        desirable: (N,) bool, whether an answer is wanted.
        baseline: scalar without a gradient, the mean of r for answers of other prompts.

    Returns:
        The losses (N,), and the rewards beta r (N,) without a gradient.
    """
    change = log_probs - reference
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    gap = change - baseline.clamp(min=0)
    losses = weight * (1 - torch.sigmoid(kto.beta * sign * gap))
    return losses, (kto.beta * change).detach()


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
    """Return KL(p || q) over the last axis, from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
