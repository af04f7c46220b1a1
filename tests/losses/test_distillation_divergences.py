"""A divergence of more tokens is larger, that of all tokens is the vocabulary's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.losses.distillation import Distillation, divergences
from mcore_qwen3vl.model.top_tokens import FLOOR

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
