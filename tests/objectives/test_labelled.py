"""KTO's losses equal the formula written out for one answer at a time."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.losses import labelled_losses
from mcore_qwen3vl.objectives.settings import Kto

POLICY = torch.tensor([-11.0, -17.5, -30.25, -4.5], dtype=torch.float64)
REFERENCE = torch.tensor([-12.5, -16.0, -28.0, -4.75], dtype=torch.float64)
DESIRABLE = torch.tensor([True, False, True, False])


def by_hand(policy: float, answer: int, baseline: float, kto: Kto) -> float:
    change = policy - float(REFERENCE[answer])
    sign, weight = (1, kto.desirable_weight) if DESIRABLE[answer] else (-1, kto.undesirable_weight)
    value = 1 / (1 + math.exp(-kto.beta * sign * (change - max(baseline, 0.0))))
    return weight * (1 - value)


@pytest.mark.parametrize("kto", [Kto(), Kto(0.4), Kto(0.3, 0.5, 1.75)], ids=str)
@pytest.mark.parametrize("baseline", [0.8, 0.0, -0.6])
def test_losses_and_gradients_are_those_of_the_formula(kto: Kto, baseline: float) -> None:
    policy = POLICY.clone().requires_grad_()
    found, rewards = labelled_losses(
        policy, REFERENCE, DESIRABLE, torch.tensor(baseline, dtype=torch.float64), kto
    )
    found.sum().backward()
    assert policy.grad is not None
    assert rewards.tolist() == pytest.approx((kto.beta * (POLICY - REFERENCE)).tolist())
    step = 1e-6
    for answer, value in enumerate(POLICY.tolist()):
        assert float(found[answer]) == pytest.approx(by_hand(value, answer, baseline, kto))
        up, down = (by_hand(value + one, answer, baseline, kto) for one in (step, -step))
        assert float(policy.grad[answer]) == pytest.approx((up - down) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("name", ["beta", "desirable_weight", "undesirable_weight"])
def test_values_without_a_meaning_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} is 0"):
        Kto(**{name: 0.0})
