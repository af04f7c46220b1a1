"""Losses and their gradients equal the formulas written out for one answer or pair at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.distillation import Distillation, divergences
from mcore_qwen3vl.losses.embedding import Contrastive
from mcore_qwen3vl.losses.kto import Kto, labelled_losses
from mcore_qwen3vl.losses.pairs import numbers_of_rewards
from mcore_qwen3vl.losses.preference import Preference, pair_losses
from mcore_qwen3vl.model.head import FLOOR

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
    numbers = {name: values.tolist() for name, values in numbers_of_rewards(rewards).items()}
    assert numbers == {
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


ANSWERS = torch.tensor([-11.0, -17.5, -30.25, -4.5], dtype=torch.float64)
REFERENCES = torch.tensor([-12.5, -16.0, -28.0, -4.75], dtype=torch.float64)
DESIRABLE = torch.tensor([True, False, True, False])


def kto_by_hand(policy: float, answer: int, baseline: float, kto: Kto) -> float:
    change = policy - float(REFERENCES[answer])
    sign, weight = (1, kto.desirable_weight) if DESIRABLE[answer] else (-1, kto.undesirable_weight)
    value = 1 / (1 + math.exp(-kto.beta * sign * (change - max(baseline, 0.0))))
    return weight * (1 - value)


@pytest.mark.parametrize("kto", [Kto(), Kto(0.4), Kto(0.3, 0.5, 1.75)], ids=str)
@pytest.mark.parametrize("baseline", [0.8, 0.0, -0.6])
def test_losses_of_labelled_answers_are_those_of_the_formula(kto: Kto, baseline: float) -> None:
    policy = ANSWERS.clone().requires_grad_()
    found, rewards = labelled_losses(
        policy, REFERENCES, DESIRABLE, torch.tensor(baseline, dtype=torch.float64), kto
    )
    found.sum().backward()
    assert policy.grad is not None
    assert rewards.tolist() == pytest.approx((kto.beta * (ANSWERS - REFERENCES)).tolist())
    step = 1e-6
    for answer, value in enumerate(ANSWERS.tolist()):
        assert float(found[answer]) == pytest.approx(kto_by_hand(value, answer, baseline, kto))
        up, down = (kto_by_hand(value + one, answer, baseline, kto) for one in (step, -step))
        assert float(policy.grad[answer]) == pytest.approx((up - down) / (2 * step), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (Preference, {"beta": 0.0}, "beta is 0"),
        (Preference, {"label_smoothing": 0.5}, "dpo_label_smoothing is 0.5"),
        (Preference, {"label_smoothing": 0.1, "kind": "ipo"}, "belongs to the sigmoid loss"),
        (Preference, {"rpo_alpha": -1.0}, "rpo_alpha is -1"),
        (Preference, {"kind": "kto"}, "one of sigmoid, hinge, ipo, simpo, orpo"),
        (Preference, {"kind": "simpo", "gamma": -0.5}, "simpo_gamma is -0.5"),
        (Preference, {"gamma": 0.5}, "simpo_gamma belongs to simpo"),
        (Kto, {"beta": 0.0}, "beta is 0"),
        (Kto, {"desirable_weight": 0.0}, "desirable_weight is 0"),
        (Kto, {"undesirable_weight": 0.0}, "undesirable_weight is 0"),
        (Contrastive, {"temperature": 0.0}, "temperature is 0"),
        (Contrastive, {"dimensions": (0,)}, "at least 1"),
    ],
)
def test_values_without_a_meaning_are_refused(
    settings: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        settings(**values)


ALL = [Distillation("forward"), Distillation("reverse"), Distillation("jsd", beta=0.3)]


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    student, teacher = 2 * torch.randn(2, 9, 13, generator=generator, dtype=torch.float64)
    return student, teacher


def coarse(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of `ids`, and of the rest, which may be empty."""
    rest = torch.ones_like(log_probs).scatter(-1, ids, 0).bool()
    left = log_probs.masked_fill(~rest, FLOOR - 9).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, ids), left.clamp(min=FLOOR)], -1)


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_more_tokens_say_more_and_all_say_what_the_vocabulary_does(settings: Distillation) -> None:
    student, teacher = (one.log_softmax(-1) for one in logits())
    order = teacher.argsort(-1, descending=True)
    values = [
        divergences(coarse(student, order[:, :k]), coarse(teacher, order[:, :k]), settings)
        for k in range(1, 14)
    ]
    assert (torch.stack(values).diff(dim=0) >= -1e-12).all()
    assert (values[0] > 0).all()
    if settings.divergence == "jsd":
        mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
        whole = 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)
    else:
        whole = kl(*(teacher, student)[:: 1 if settings.divergence == "forward" else -1])
    torch.testing.assert_close(values[-1], whole)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q), whose arguments torch takes the other way round."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_the_teacher_itself_has_no_divergence_and_no_gradient(settings: Distillation) -> None:
    _, teacher = (one.log_softmax(-1) for one in logits())
    student = teacher.clone().requires_grad_()
    found = divergences(student.log_softmax(-1), teacher, settings)
    found.sum().backward()
    assert student.grad is not None
    assert max(float(found.abs().max()), float(student.grad.abs().max())) < 1e-12
