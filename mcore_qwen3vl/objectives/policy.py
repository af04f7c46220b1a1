"""Policy-gradient losses of PPO, GRPO, DAPO and GSPO, from log-probabilities.

Nothing here knows a model, a layout or a trainer: the log-probabilities come from
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
    """How far the ratio of new to old probability may go and still be learnt from.

    Attributes:
        low, high: the ratio is clipped to [1 - low, 1 + high]. Equal: Schulman et al., "PPO", 2017;
            high above low: Yu et al., "DAPO", 2025, section 3.1.
        dual: where the advantage is negative, the loss is at most -dual * advantage (Ye et al.,
            "Mastering Complex Control in MOBA Games", 2020). None: no such bound.

    Raises:
        BadInput: a bound that contradicts another.
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
    """A loss, and what tells how training goes: scalars, the last three without a gradient."""

    loss: Tensor
    clipped: (
        Tensor  # share of the tokens whose ratio is clipped by low or high, and not learnt from
    )
    dual_clipped: Tensor  # share of the tokens bounded by the dual clip
    old_kl: Tensor  # mean over tokens of log old - log new


def ratios(log_probs: Tensor, old: Tensor, mask: Tensor, level: Level = "token") -> Tensor:
    """New over old probability of each token.

    Args:
        log_probs: (B, T) of the policy.
        old: (B, T) of the policy that sampled the tokens, without a gradient.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        level: ``token``: of the token itself (PPO, GRPO). ``sequence``: the geometric mean over the
            answer, with each token's gradient its own: Zheng et al., "Group Sequence Policy
            Optimization", 2025, equation 14 (GSPO-token). Where the advantages of a sequence are
            all the same, value and gradient are those of equation 7, GSPO itself.

    Returns:
        (B, T) with a gradient for `log_probs`; 1 outside the mask.
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
    """The clipped surrogate loss, and the divergence from a reference where one is given.

    max(-A r, -A clip(r, 1 - low, 1 + high)) at each token; with `reference`, plus `kl_coefficient`
    times the estimate of the divergence (GRPO's loss, Shao et al., "DeepSeekMath", 2024, equation
    3, with ``seq-mean-token-mean`` and ``k3``).

    Args:
        log_probs: (B, T) float32 of the policy, of the tokens that were sampled.
        old: (B, T) of the policy that sampled them, without a gradient.
        advantages: (B, T), without a gradient; or (B, 1) of whole answers.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        level: of the ratio, see :func:`ratios`.
        clipping: of the ratio.
        mode: see :func:`mcore_qwen3vl.objectives.aggregate.aggregate`, as for `tokens`, `sequences`
            and `horizon`.
        reference: (B, T) of the reference policy, without a gradient; needs `kl_coefficient`.
        kl_coefficient: weight of the divergence.
        kl_estimate: see :func:`mcore_qwen3vl.objectives.divergence.divergence`.

    Raises:
        BadInput: a name that is not known, or one of `reference` and `kl_coefficient` alone.
    """
    if (reference is None) != (kl_coefficient == 0):
        raise BadInput(
            "The divergence needs both log-probabilities of the reference and a coefficient other "
            "than 0; one of them alone would change nothing."
        )
    inside = mask.bool()  # outside there may be infinities, whose gradients would not be 0
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
