"""Losses of single tokens: what each sums, what is refused, and where functions are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses import tokens

LOSSES = torch.tensor([[2.0, 3.0, 5.0], [7.0, float("inf"), 11.0]])
WEIGHTS = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("loss", "total", "normaliser"),
    [
        (tokens.cross_entropy, 2 + 5 + 7, 3),  # trained tokens count alike
        (tokens.weighted_cross_entropy, 2 + 0.5 * 5 + 2 * 7, 3.5),
        (tokens.scaled_cross_entropy, 2 + 0.5 * 5 + 2 * 7, 3),  # the number of tokens
    ],
)
def test_what_a_loss_sums_and_what_divides_it(loss: Any, total: float, normaliser: float) -> None:
    assert [value.item() for value in loss(LOSSES, WEIGHTS)] == [total, normaliser]


def test_infinite_losses_at_padding_leave_no_gradient() -> None:
    given = LOSSES.clone().requires_grad_()
    tokens.weighted_cross_entropy(given, WEIGHTS)[0].backward()
    assert torch.equal(given.grad, WEIGHTS)


def test_a_module_function_is_found() -> None:
    path = "mcore_qwen3vl.losses.tokens:cross_entropy"
    assert tokens.find_loss(path) is tokens.cross_entropy


def test_losses_of_data_sets_leave_out_rows_of_padding_alone() -> None:
    """Micro-batches of fixed shape have such rows where records cannot be used."""
    batch: Any = SimpleNamespace(
        data_sets=["b", "a"], sequences=lambda: torch.arange(4)[:, None].expand(4, 3)
    )
    weights = torch.ones(4, 2)
    found = tokens._weights_of_data_sets(batch, torch.tensor([0, 2]), weights)
    assert {name: part.sum(1).tolist() for name, part in found.items()} == {
        "b": [2, 0, 0, 0],
        "a": [0, 2, 0, 0],
    }


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
        tokens.token_objective(mine)(batch, torch.arange(4), torch.ones(1, 4))
    assert told in str(refused.value)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("mine", "mcore_qwen3vl.losses.tokens:weighted_cross_entropy", tokens.GROUP)
    monkeypatch.setattr(tokens, "entry_points", lambda group: [entry])
    assert tokens.find_loss("mine") is tokens.weighted_cross_entropy


@pytest.mark.parametrize("name", ["no.such.module:loss", "math:no_such_loss"])
def test_a_function_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        tokens.find_loss(name)
