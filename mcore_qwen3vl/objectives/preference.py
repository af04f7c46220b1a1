"""Losses of preferences: of pairs of answers, of labelled answers (KTO), and of reward models.

Those over pairs of a chosen and a rejected answer are DPO and its relatives, SimPO and ORPO.
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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.objectives.settings import Kto, Preference


@dataclass(frozen=True)
class PairLosses:
    """Losses and rewards of P pairs, each (P,) float32; only `losses` has a gradient."""

    losses: Tensor
    chosen_rewards: Tensor  # beta (log p - log p0); without a reference beta m
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """1.0 if the chosen answer's reward is higher than the rejected one's, else 0.0."""
        return (self.margins > 0).float()


def pair_losses(
    log_probs: Tensor, reference: Tensor | None, lengths: Tensor, preference: Preference
) -> PairLosses:
    """Compute the loss of each pair.

    Args:
        log_probs: (P, 2) float32, the policy's log-probabilities of the chosen and the rejected
            answer, summed over tokens.
        reference: (P, 2), the reference's log-probabilities, without a gradient; None for a loss
            without a reference.
        lengths: (P, 2), the answers' numbers of tokens.
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
    return PairLosses(losses, rewards[:, 0], rewards[:, 1])


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


def reward_losses(rewards: Tensor, margins: Tensor) -> Tensor:
    """Compute the Bradley-Terry loss (P,) of each pair, with which reward models are trained.

    It is -log sigmoid(r(chosen) - r(rejected) - margin). Source: Ouyang et al., "Training language
    models to follow instructions with human feedback", 2022; the margin is that of Touvron et al.,
    "Llama 2", 2023, as in TRL's ``RewardTrainer``.

    Args:
        rewards: (P, 2) float32, of the chosen and the rejected answer.
        margins: (P,) float32, by how much the chosen answer is better.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
