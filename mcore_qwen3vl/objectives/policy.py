"""Policy-gradient losses of PPO, GRPO, DAPO and GSPO, from log-probabilities.

They do not depend on a model, a layout or a trainer: the log-probabilities come from
:func:`mcore_qwen3vl.model.head.log_probs.token_log_probs`, or from anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.aggregate import Aggregation, aggregate
from mcore_qwen3vl.objectives.divergence import divergence

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Clipping:
    """The bounds of the ratio of new to old probability; beyond them a token has no gradient.

    Attributes:
        low, high: the ratio is clipped to [1 - low, 1 + high]. Equal bounds: Schulman et al.,
            "PPO", 2017; high above low: Yu et al., "DAPO", 2025, section 3.1.
        dual: bound on the loss of tokens with a negative advantage, which is at most
            -dual * advantage (Ye et al., "Mastering Complex Control in MOBA Games", 2020). None: no
            bound.

    Raises:
        BadInput: a bound is out of range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise BadInput(
                f"The ratio is clipped to [1 - {self.low:g}, 1 + {self.high:g}]: low must be from "
                "0 to below 1, and high not below 0."
            )
        if self.dual is not None and self.dual <= 1:
            raise BadInput(f"The dual clip is {self.dual:g}: it bounds ratios above 1.")


@dataclass(frozen=True)
class PolicyLoss:
    """A loss and statistics of it, all scalars; the last three have no gradient."""

    loss: Tensor
    clipped: Tensor  # share of tokens without a gradient, because low or high clips their ratio
    dual_clipped: Tensor  # share of tokens bounded by the dual clip
    old_kl: Tensor  # mean of log old - log new over tokens


def ratios(log_probs: Tensor, old: Tensor, mask: Tensor, level: Level = "token") -> Tensor:
    """Compute the ratio of new to old probability for each token.

    Args:
        log_probs: (B, T), the policy's log-probabilities.
        old: (B, T), those of the policy that sampled the tokens, without a gradient.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        level: ``token``: the ratio of the token itself (PPO, GRPO). ``sequence``: the geometric
            mean over the answer, with each token's own gradient: Zheng et al., "Group Sequence
            Policy Optimization", 2025, equation 14 (GSPO-token). If all advantages of a sequence
            are equal, value and gradient are those of equation 7, GSPO itself.

    Returns:
        (B, T) with a gradient for `log_probs`; 1 outside the mask.

    Raises:
        BadInput: `level` is not known.
    """
    if level not in get_args(Level):
        raise BadInput(
            f"The level of ratios is {level!r}; it must be one of {', '.join(get_args(Level))}."
        )
    change = (log_probs - old).where(mask.bool(), 0.0)
    if level == "token":
        return change.exp()
    mean = change.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    own = log_probs.where(mask.bool(), 0.0)
    return (own - own.detach() + mean.detach()).exp().where(mask.bool(), 1.0)


def policy_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    clipping: Clipping = Clipping(),
    mode: Aggregation = "token-mean",
    reference: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_estimate: str = "k3",
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    horizon: float | None = None,
) -> PolicyLoss:
    """Compute the clipped surrogate loss, plus the divergence from a reference if one is given.

    The loss of each token is max(-A r, -A clip(r, 1 - low, 1 + high)). With `reference`,
    `kl_coefficient` times the estimate of the divergence is added (GRPO's loss, Shao et al.,
    "DeepSeekMath", 2024, equation 3, with ``seq-mean-token-mean`` and ``k3``).

    Args:
        log_probs: (B, T) float32, the policy's log-probabilities of the sampled tokens.
        old: (B, T), those of the policy that sampled the tokens, without a gradient.
        advantages: (B, T), or (B, 1) for whole answers, without a gradient.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        level: level of the ratio, see :func:`ratios`.
        clipping: bounds of the ratio.
        mode, tokens, sequences, horizon: see
            :func:`mcore_qwen3vl.objectives.aggregate.aggregate`.
        reference: (B, T), the reference's log-probabilities, without a gradient; it needs
            `kl_coefficient`.
        kl_coefficient: weight of the divergence.
        kl_estimate: see :func:`mcore_qwen3vl.objectives.divergence.divergence`.

    Raises:
        BadInput: a name is not known, or only one of `reference` and `kl_coefficient` is given.
    """
    if (reference is None) != (kl_coefficient == 0):
        raise BadInput(
            "The divergence needs both log-probabilities of the reference and a coefficient other "
            "than 0; one of them alone would change nothing."
        )
    inside = mask.bool()  # values outside may be infinite, and their gradients not 0
    log_probs, old = log_probs.where(inside, 0.0), old.where(inside, 0.0)
    advantages = advantages.expand_as(log_probs).where(inside, 0.0)
    ratio = ratios(log_probs, old, mask, level)
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clipping.low, 1 + clipping.high)
    losses = torch.maximum(free, held)
    bounded = torch.zeros_like(losses, dtype=torch.bool)
    if clipping.dual is not None:
        most = -advantages * clipping.dual
        bounded = (advantages < 0) & (losses > most)
        losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    total = partial(
        aggregate, mask=mask, mode=mode, tokens=tokens, sequences=sequences, horizon=horizon
    )
    loss = total(losses)
    if reference is not None:
        kl = divergence(log_probs, reference.where(inside, 0.0), kl_estimate)
        loss = loss + kl_coefficient * total(kl)
    with torch.no_grad():
        return PolicyLoss(
            loss,
            aggregate((held > free).float(), mask, tokens=tokens),
            aggregate(bounded.float(), mask, tokens=tokens),
            aggregate(old - log_probs, mask, tokens=tokens),
        )
