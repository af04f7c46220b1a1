"""Losses: sums and counts, padding, and finding them by name."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.step import losses

LOSSES = torch.tensor([[2.0, 3.0, 5.0], [7.0, float("inf"), 11.0]])
WEIGHTS = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 0.0]])


def test_cross_entropy_counts_trained_tokens_alike() -> None:
    total, normaliser = losses.cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 5 + 7
    assert normaliser.item() == 3


def test_weighted_cross_entropy_is_a_weighted_mean() -> None:
    total, normaliser = losses.weighted_cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 0.5 * 5 + 2 * 7
    assert normaliser.item() == 3.5


def test_scaled_cross_entropy_divides_by_the_tokens() -> None:
    total, normaliser = losses.scaled_cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 0.5 * 5 + 2 * 7
    assert normaliser.item() == 3


def test_infinite_losses_at_padding_leave_no_gradient() -> None:
    given = LOSSES.clone().requires_grad_()
    losses.weighted_cross_entropy(given, WEIGHTS)[0].backward()
    assert torch.equal(given.grad, WEIGHTS)


def test_a_module_function_is_found() -> None:
    path = "mcore_qwen3vl.training.step.losses:cross_entropy"
    assert losses.find_loss(path) is losses.cross_entropy


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint(
        "mine", "mcore_qwen3vl.training.step.losses:weighted_cross_entropy", losses.GROUP
    )
    monkeypatch.setattr(losses, "entry_points", lambda group: [entry])
    assert losses.find_loss("mine") is losses.weighted_cross_entropy


@pytest.mark.parametrize("name", ["focal", "no.such.module:loss", "math:no_such_loss"])
def test_an_unknown_loss_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        losses.find_loss(name)
