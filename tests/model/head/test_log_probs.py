"""Log-probabilities in chunks equal torch's on all logits, in values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import head
from mcore_qwen3vl.model.head import Columns, token_log_probs
from mcore_qwen3vl.runtime.launch import initialize, run_layout

LENGTH, BATCH, WIDTH, VOCABULARY, PADDED = 11, 2, 12, 37, 48


@dataclass
class Inputs:
    hidden: Tensor  # (s, B, H)
    weight: Tensor  # (V padded, H)
    targets: Tensor  # (B, s)
    of_log_probs: Tensor  # (B, s) incoming gradients
    of_entropy: Tensor


def inputs() -> Inputs:
    torch.manual_seed(7)
    return Inputs(
        torch.randn(LENGTH, BATCH, WIDTH),
        torch.randn(PADDED, WIDTH),  # padding rows included
        torch.randint(VOCABULARY, (BATCH, LENGTH)),
        torch.randn(BATCH, LENGTH),
        torch.randn(BATCH, LENGTH),
    )


def expected(given: Inputs, temperature: float) -> dict[str, Tensor]:
    hidden, weight = (t.double().requires_grad_() for t in (given.hidden, given.weight))
    logits = (hidden @ weight[:VOCABULARY].t()).transpose(0, 1) / temperature
    every = logits.log_softmax(-1)
    found = every.gather(-1, given.targets[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    torch.autograd.backward([found, entropy], [given.of_log_probs, given.of_entropy])
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "log_probs": found.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def on_rank(layout: Layout, chunk: int | None, temperature: float) -> dict[str, Tensor]:
    """Return outputs and gradients: of hidden states summed over ranks, of this rank's weight."""
    initialize(layout)
    given, rows, rank = inputs(), PADDED // layout.tp, dist.get_rank()
    hidden = given.hidden.requires_grad_()
    weight = given.weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    count = min(max(VOCABULARY - rank * rows, 0), rows)
    columns = Columns(rank * rows, count, chunk, dist.group.WORLD)
    found, entropy = token_log_probs(
        hidden,
        weight,
        given.targets,
        columns,
        temperature=temperature,
        entropy=True,
    )
    assert entropy is not None
    torch.autograd.backward([found, entropy], [given.of_log_probs, given.of_entropy])
    assert hidden.grad is not None
    assert weight.grad is not None
    dist.all_reduce(hidden.grad)
    return {
        "log_probs": found.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def check(found: Tensor, right: Tensor) -> None:
    assert (found - right).abs().max() <= 2e-6 * right.abs().max()


@pytest.mark.parametrize(
    ("tp", "chunk", "temperature"),
    [
        (1, None, 0.7),
        (1, 5, 1.0),
        (2, None, 1.0),
        (2, 1, 0.7),
        (2, 5, 1.3),
        (4, None, 1.3),
        (4, 5, 0.7),
    ],
)
def test_equals_torch(tp: int, chunk: int | None, temperature: float) -> None:
    """Values and gradients equal torch's; with TP 4 the last rank's columns are all padding."""
    right = expected(inputs(), temperature)
    ranks = run_layout(on_rank, tp, Layout(tp=tp), chunk, temperature)
    for rank in ranks:
        for name in ("log_probs", "entropy", "hidden"):
            check(rank[name], right[name])
    weight = torch.cat([rank["weight"] for rank in ranks])
    check(weight, right["weight"])


def _without_or_with_entropy(
    chunk: int | None, temperature: float, entropy: bool
) -> list[tuple[Tensor, ...]]:
    """Return log-probabilities and gradients of this rank's columns, twice from the same graph."""
    initialize(Layout(tp=2))
    given, rank = inputs(), torch.distributed.get_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    columns = Columns(*((0, 9) if rank == 0 else (9, VOCABULARY - 9)), chunk, group)
    rows = slice(columns.first, columns.first + columns.count)
    hidden, weight = given.hidden.clone(), given.weight[rows].clone()
    found, _ = token_log_probs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        given.targets,
        columns,
        temperature=temperature,
        entropy=entropy,
    )
    return [
        (found.detach(), *torch.autograd.grad(found, [hidden, weight], of, retain_graph=True))
        for of in (given.of_log_probs, given.of_log_probs)
    ]


@pytest.mark.parametrize("chunk", [5, None], ids=["chunks", "kept"])
def test_without_entropy_the_log_probs_and_their_gradients_are_the_same(
    chunk: int | None,
) -> None:
    for right, found in zip(
        run_layout(_without_or_with_entropy, 2, 5, 0.7, True),
        run_layout(_without_or_with_entropy, 2, chunk, 0.7, False),
        strict=True,
    ):
        torch.testing.assert_close(found, right)


def test_one_chunk_of_logits_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, times = inputs(), []
    logits = head.Columns.logits
    monkeypatch.setattr(head.Columns, "logits", lambda *args: (times.append(1), logits(*args))[1])
    hidden, weight = given.hidden.requires_grad_(), given.weight[:VOCABULARY].requires_grad_()
    found, _ = token_log_probs(hidden, weight, given.targets, Columns(0, VOCABULARY))
    found.sum().backward()
    assert len(times) == 1


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_has_no_gradient_and_the_other_its_own(frozen: str) -> None:
    given, right = inputs(), expected(inputs(), 1.0)
    hidden = given.hidden.requires_grad_(frozen != "hidden")
    weight = given.weight.requires_grad_(frozen != "weight")
    found, entropy = token_log_probs(
        hidden, weight, given.targets, Columns(0, VOCABULARY, 4), entropy=True
    )
    torch.autograd.backward([found, entropy], [given.of_log_probs, given.of_entropy])
    grads = {"hidden": hidden.grad, "weight": weight.grad}
    assert grads.pop(frozen) is None
    for name, gradient in grads.items():
        check(gradient, right[name])


def test_bf16_adds_the_weights_gradient_up_in_float32() -> None:
    """1,000 equal gradients are added one at a time, where a sum in bf16 would stop at 256."""
    hidden = torch.ones(1000, 1, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, 1000, dtype=torch.int64)
    found, _ = token_log_probs(hidden, weight, targets, Columns(0, 2, chunk=1))
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0] == 500
