"""Estimates of the KL divergence of the policy from its reference, at sampled tokens.

Source: Schulman, "Approximating KL divergence", 2020 (k1, k2, k3). With r = log p0 - log p:
k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1. All estimate KL(p || p0) if the tokens come from p.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from mcore_qwen3vl.errors import BadInput

Estimate = Literal["k1", "k2", "k3"]

_ALIASES: dict[str, Estimate] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""VERL's names for the estimates."""

FARTHEST = 20.0
"""The bound to which k3 clamps r, whose exponential would otherwise dominate the loss."""


def divergence(log_probs: Tensor, reference: Tensor, estimate: str = "k3") -> Tensor:
    """Estimate the divergence at each token.

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
    if kind == "k1":
        value = -back
    elif kind == "k2":
        value = back.square() / 2
    else:
        bounded = back.clamp(-FARTHEST, FARTHEST)
        value = bounded.exp() - bounded - 1
    if not estimate.endswith("+"):
        return value
    slope = back.square() / 2
    return slope - slope.detach() + value.detach()
