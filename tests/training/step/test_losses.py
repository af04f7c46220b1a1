"""Losses have the right sums and counts, ignore padding, and are found by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training import forward_step

LOSSES = torch.tensor([[2.0, 3.0, 5.0], [7.0, float("inf"), 11.0]])
WEIGHTS = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 0.0]])


def test_cross_entropy_counts_trained_tokens_alike() -> None:
    total, normaliser = forward_step.cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 5 + 7
    assert normaliser.item() == 3


def test_weighted_cross_entropy_is_a_weighted_mean() -> None:
    total, normaliser = forward_step.weighted_cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 0.5 * 5 + 2 * 7
    assert normaliser.item() == 3.5


def test_scaled_cross_entropy_divides_by_the_tokens() -> None:
    total, normaliser = forward_step.scaled_cross_entropy(LOSSES, WEIGHTS)
    assert total.item() == 2 + 0.5 * 5 + 2 * 7
    assert normaliser.item() == 3


def test_infinite_losses_at_padding_leave_no_gradient() -> None:
    given = LOSSES.clone().requires_grad_()
    forward_step.weighted_cross_entropy(given, WEIGHTS)[0].backward()
    assert torch.equal(given.grad, WEIGHTS)


def test_a_module_function_is_found() -> None:
    path = "mcore_qwen3vl.training.forward_step:cross_entropy"
    assert forward_step.find_loss(path) is forward_step.cross_entropy


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (torch.ones([]), "a tensor of shape ()"),
        ((torch.ones(2), torch.ones([])), "a tensor of shape (2,), a tensor of shape ()"),
        ((torch.ones([]), 3), "a value of type int"),
        (None, "a value of type NoneType"),
    ],
)
def test_what_is_no_pair_of_scalars_is_refused(found: Any, told: str) -> None:
    def mine(losses: Any, weights: Any) -> Any:
        return found

    batch: Any = SimpleNamespace(loss_weights=torch.ones(1, 4))
    with pytest.raises(BadInput, match=r"mine returned .*a pair of scalar tensors") as refused:
        forward_step.token_objective(mine)(batch, torch.arange(4), torch.ones(1, 4))
    assert told in str(refused.value)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint(
        "mine", "mcore_qwen3vl.training.forward_step:weighted_cross_entropy", forward_step.GROUP
    )
    monkeypatch.setattr(forward_step, "entry_points", lambda group: [entry])
    assert forward_step.find_loss("mine") is forward_step.weighted_cross_entropy


@pytest.mark.parametrize("name", ["focal", "no.such.module:loss", "math:no_such_loss"])
def test_an_unknown_loss_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        forward_step.find_loss(name)


def test_the_losses_that_exist_are_listed() -> None:
    with pytest.raises(BadInput, match=r"There are cross_entropy, .*dpo, .*kto"):
        forward_step.find_loss("dop")


@pytest.mark.parametrize(
    ("data_sets", "groups"),
    [
        (("a", "b", "a"), (1, 2)),  # sequences are units: documents of a reranker
        (("a", "a", "b", "b", "b", "a", "a"), (2, 3, 2)),  # records are: queries and pairs
    ],
)
def test_units_count_for_their_data_set(
    data_sets: tuple[str, ...], groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_step.parallel_state, "get_context_parallel_world_size", lambda: 2)
    each = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    batch: Any = SimpleNamespace(data_sets=data_sets, groups=groups)
    found = forward_step.reduce_units(each.sum(), batch, {"loss": each, "other": -each})
    assert float(found.normaliser) == 1.5
    parts = {name: (float(a), float(b)) for name, (a, b) in found.data_sets.items()}
    assert parts == {"a": (3.0, 1.0), "b": (1.0, 0.5)}
