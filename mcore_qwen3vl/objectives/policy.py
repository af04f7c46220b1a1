"""Policy-gradient losses of PPO, GRPO, DAPO and GSPO, from log-probabilities.

They do not depend on a model, a layout or a trainer: the log-probabilities come from
:func:`mcore_qwen3vl.model.head.log_probs.token_log_probs`, or from anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.errors import BadInput

Level = Literal["token", "sequence"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Estimate = Literal["k1", "k2", "k3"]

_ALIASES: dict[str, Estimate] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""VERL's names for the estimates."""

FARTHEST = 20.0
"""The bound to which k3 clamps r, whose exponential would otherwise dominate the loss."""


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
        level: ``token``: r is the ratio of the token itself (PPO, GRPO). ``sequence``: it is the
            geometric mean over the answer, with each token's own gradient: Zheng et al., "Group
            Sequence Policy Optimization", 2025, equation 14 (GSPO-token). If all advantages of a
            sequence are equal, value and gradient are those of equation 7, GSPO itself.
        mode, tokens, sequences, horizon: see :func:`aggregate`.
        reference: (B, T), the reference's log-probabilities, without a gradient; it needs
            `kl_coefficient`.
        kl_estimate: see :func:`divergence`.

    Raises:
        BadInput: a name is not known, or only one of `reference` and `kl_coefficient` is given.
    """
    if (reference is None) != (kl_coefficient == 0):
        raise BadInput(
            "The divergence needs both log-probabilities of the reference and a coefficient other "
            "than 0; one of them alone would change nothing."
        )
    _check_name("The level of ratios", level, get_args(Level))
    inside = mask.bool()  # values outside may be infinite, and their gradients not 0
    log_probs, old = log_probs.where(inside, 0.0), old.where(inside, 0.0)
    advantages = advantages.expand_as(log_probs).where(inside, 0.0)
    change = log_probs - old
    if level == "sequence":
        mean = change.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        change = (log_probs - log_probs.detach() + mean.detach()).where(inside, 0.0)
    ratio = change.exp()
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
        statistics = ((held > free).float(), bounded.float(), old - log_probs)
        return PolicyLoss(loss, *(aggregate(each, mask, tokens=tokens) for each in statistics))


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    horizon: float | None = None,
) -> Tensor:
    """Reduce the values of tokens to one number, in VERL's modes and under VERL's names.

    - ``token-mean``: the mean over all tokens (Yu et al., "DAPO", 2025, section 3.3).
    - ``seq-mean-token-sum``: the mean over sequences of each one's sum.
    - ``seq-mean-token-mean``: the mean over sequences of each one's mean (Shao et al.,
      "DeepSeekMath", 2024, GRPO).
    - ``seq-mean-token-sum-norm``: the mean over sequences of each one's sum, divided by a length
      that is the same for all (Liu et al., "Understanding R1-Zero-Like Training", 2025, Dr. GRPO).

    If a global batch is divided over micro-batches or ranks, pass `tokens` or `sequences` of the
    whole batch: the results of the parts then add up to the result of the whole.

    Args:
        values: (B, T) float, one a token.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        mode: one of the modes above.
        tokens: number of tokens in the mask, for ``token-mean``; None: count those of `mask`.
        sequences: number of sequences with a token in the mask, for the other modes; None: count
            those of `mask`.
        horizon: length that ``seq-mean-token-sum-norm`` divides by; None: T, padding included, as
            in VERL.

    Returns:
        A scalar with a gradient for `values` inside the mask; 0 if the mask is empty.

    Raises:
        BadInput: `mode` is not known.
    """
    _check_name("loss_agg_mode", mode, get_args(Aggregation))
    mask = mask.bool()
    counts = mask.sum(-1)  # (B,)
    kept = values.where(mask, 0.0)  # not a product: values outside may be infinite
    if mode == "token-mean":
        return kept.sum() / (counts.sum().clamp(min=1) if tokens is None else tokens)
    if sequences is None:
        sequences = (counts > 0).sum().clamp(min=1)
    of_sequences = kept.sum(-1)
    if mode == "seq-mean-token-mean":
        of_sequences = of_sequences / counts.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        of_sequences = of_sequences / (values.shape[-1] if horizon is None else horizon)
    return of_sequences.sum() / sequences


def divergence(log_probs: Tensor, reference: Tensor, estimate: str = "k3") -> Tensor:
    """Estimate the KL divergence of the policy p from its reference p0 at each sampled token.

    With r = log p0 - log p: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1. All estimate KL(p || p0) if
    the tokens come from p. Source: Schulman, "Approximating KL divergence", 2020.

    The gradients of the estimates differ: in expectation that of k1 is 0, that of k2 is the
    gradient of KL(p || p0), and that of k3 is the gradient of KL(p0 || p). ``k1+`` and ``k3+`` have
    the values of k1 and k3 and the gradient of k2 (VERL's straight-through estimates).

    Args:
        log_probs: (B, T), the policy's log-probabilities.
        reference: (B, T), the reference's log-probabilities, without a gradient.
        estimate: ``k1``, ``k2`` or ``k3``, or VERL's ``mse``, ``kl`` or ``low_var_kl``; optionally
            followed by ``+``, as explained above.

    Returns:
        (B, T), with a gradient for `log_probs`.

    Raises:
        BadInput: there is no such estimate.
    """
    name = estimate.removesuffix("+")
    kind = _ALIASES.get(name, name)
    if kind not in get_args(Estimate):
        raise BadInput(
            f"The estimate of KL is {estimate!r}; it must be one of "
            f"{', '.join([*get_args(Estimate), *_ALIASES])}, or such a name and +."
        )
    back = reference - log_probs
    slope = back.square() / 2
    if kind == "k1":
        value = -back
    elif kind == "k2":
        value = slope
    else:
        bounded = back.clamp(-FARTHEST, FARTHEST)
        value = bounded.exp() - bounded - 1
    return slope - slope.detach() + value.detach() if estimate.endswith("+") else value


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise BadInput(f"{what} is {name!r}; it must be one of {', '.join(known)}.")
