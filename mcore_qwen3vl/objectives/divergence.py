"""Estimates of the divergence of the policy from its reference, from the tokens that were sampled.

Source: Schulman, "Approximating KL divergence", 2020 (k1, k2, k3). With r = log p0 - log p:
k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1; all estimate KL(p || p0) where the tokens come from p.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from mcore_qwen3vl.errors import BadInput

Estimate = Literal["k1", "k2", "k3"]

_ALIASES: dict[str, Estimate] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Other names that verl has for them."""

FARTHEST = 20.0
"""Beyond this r is taken to be this: its exponential would be the whole loss."""


def divergence(log_probs: Tensor, reference: Tensor, estimate: str = "k3") -> Tensor:
    """The estimate at each token.

    As losses they differ from what they estimate: the gradient of k1 is 0 in expectation, that of
    k2 is the divergence's, that of k3 is the one of KL(p0 || p). ``k1+`` and ``k3+`` have the value
    of k1 and k3 and the gradient of k2 (verl's straight-through estimates).

    Args:
        log_probs: (B, T) of the policy.
        reference: (B, T) of the reference, without a gradient.
        estimate: ``k1``, ``k2``, ``k3``; verl's ``kl``, ``mse``, ``low_var_kl``; with ``+`` after
            it, see above.

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
