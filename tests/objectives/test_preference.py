"""Losses over pairs equal the formulas written out for one pair at a time."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.losses import numbers_of_rewards, pair_losses
from mcore_qwen3vl.objectives.settings import Preference

POLICY = torch.tensor([[-11.0, -17.5], [-30.25, -21.0], [-4.0, -4.5]], dtype=torch.float64)
REFERENCE = torch.tensor([[-12.5, -16.0], [-28.0, -23.0], [-4.25, -4.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[3.0, 7.0], [11.0, 5.0], [2.0, 13.0]], dtype=torch.float64)

CASES = [
    Preference(),
    Preference(beta=0.37),
    Preference(beta=0.7, label_smoothing=0.15),
    Preference("hinge", beta=0.6),
    Preference("ipo", beta=0.2),
    Preference(beta=0.3, rpo_alpha=1.7),
    Preference("ipo", beta=0.9, rpo_alpha=0.4),
    Preference("simpo", beta=2.5, gamma=0.55),
    Preference("simpo", beta=0.3, gamma=0.0, rpo_alpha=0.8),
    Preference("orpo", beta=0.35, rpo_alpha=1.0),
]


def by_hand(policy: list[float], pair: int, p: Preference) -> float:
    """Compute the loss of one pair with Python's floats."""
    (chosen, rejected), (r_chosen, r_rejected) = policy, REFERENCE[pair].tolist()
    n_chosen, n_rejected = LENGTHS[pair].tolist()

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    if p.kind in ("simpo", "orpo"):
        means = chosen / n_chosen, rejected / n_rejected
        if p.kind == "simpo":
            loss = -math.log(sigmoid(p.beta * (means[0] - means[1]) - p.gamma))
        else:
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
            loss = -p.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
        return loss - p.rpo_alpha * means[0]
    gap = (chosen - r_chosen) - (rejected - r_rejected)
    if p.kind == "sigmoid":
        right, wrong = sigmoid(p.beta * gap), sigmoid(-p.beta * gap)
        loss = -(1 - p.label_smoothing) * math.log(right) - p.label_smoothing * math.log(wrong)
    elif p.kind == "hinge":
        loss = max(0.0, 1 - p.beta * gap)
    else:
        means = (chosen / n_chosen - r_chosen / n_chosen) - (
            rejected / n_rejected - r_rejected / n_rejected
        )
        loss = (means - 1 / (2 * p.beta)) ** 2
    return loss + p.rpo_alpha * (-chosen / n_chosen)


@pytest.mark.parametrize("preference", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_formula(preference: Preference) -> None:
    policy = POLICY.clone().requires_grad_()
    reference = REFERENCE if preference.has_reference else None
    losses, _ = pair_losses(policy, reference, LENGTHS, preference)
    losses.sum().backward()
    assert policy.grad is not None
    step = 1e-6
    for pair in range(len(POLICY)):
        values = POLICY[pair].tolist()
        assert float(losses[pair]) == pytest.approx(by_hand(values, pair, preference))
        for side in range(2):
            up, down = list(values), list(values)
            up[side] += step
            down[side] -= step
            slope = (by_hand(up, pair, preference) - by_hand(down, pair, preference)) / (2 * step)
            assert float(policy.grad[pair, side]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_rewards_margins_and_accuracies() -> None:
    _, rewards = pair_losses(POLICY, REFERENCE, LENGTHS, Preference(beta=0.5))
    found = {name: values.tolist() for name, values in numbers_of_rewards(rewards).items()}
    assert found == {
        "rewards chosen": [0.75, -1.125, 0.125],
        "rewards rejected": [-0.75, 1.0, -0.25],
        "rewards margin": [1.5, -2.125, 0.375],
        "rewards accuracy": [1.0, 0.0, 1.0],
    }


def test_rewards_without_a_reference_are_means_over_tokens() -> None:
    _, rewards = pair_losses(POLICY, None, LENGTHS, Preference("simpo", beta=1.5, gamma=1.0))
    assert rewards[:, 0].tolist() == pytest.approx([-5.5, -4.125, -3.0])
    assert rewards[:, 1].tolist() == pytest.approx([-3.75, -6.3, -0.519230769])
    assert numbers_of_rewards(rewards)["rewards accuracy"].tolist() == [0.0, 1.0, 0.0]


def test_answers_that_are_certain_have_finite_odds() -> None:
    """A probability that float32 rounds to 1 would make the gradient NaN for the whole model."""
    policy = torch.tensor([[0.0, -3.0], [-1e-9, 0.0], [-2.0, -1e-8]]).requires_grad_()
    preference = Preference("orpo", beta=0.1, rpo_alpha=1.0)
    losses, _ = pair_losses(policy, None, torch.ones(3, 2), preference)
    losses.sum().backward()
    assert policy.grad is not None
    assert losses.isfinite().all()
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"label_smoothing": 0.5}, "dpo_label_smoothing is 0.5"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "belongs to the sigmoid loss"),
        ({"rpo_alpha": -1.0}, "rpo_alpha is -1"),
        ({"kind": "kto"}, "one of sigmoid, hinge, ipo, simpo, orpo"),
        ({"kind": "simpo", "gamma": -0.5}, "simpo_gamma is -0.5"),
        ({"gamma": 0.5}, "simpo_gamma belongs to simpo"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Preference(**values)
