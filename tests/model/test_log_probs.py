"""Log-probabilities of the head equal torch's on all logits, in values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import log_probs
from mcore_qwen3vl.model.log_probs import Columns, token_log_probs
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


def expected(given: Inputs, temperature: float, with_entropy: bool = True) -> dict[str, Tensor]:
    hidden, weight = (t.double().requires_grad_() for t in (given.hidden, given.weight))
    logits = (hidden @ weight[:VOCABULARY].t()).transpose(0, 1) / temperature
    every = logits.log_softmax(-1)
    found = every.gather(-1, given.targets[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    of_entropy = given.of_entropy if with_entropy else torch.zeros_like(entropy)
    torch.autograd.backward([found, entropy], [given.of_log_probs, of_entropy])
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "log_probs": found.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def share_of(layout: Layout, chunk: int | None) -> tuple[Inputs, Tensor, Tensor, Columns]:
    """Start this rank; return inputs, hidden states, its rows of the weight, and its columns."""
    initialize(layout)
    given, rows, rank = inputs(), PADDED // layout.tp, dist.get_rank()
    weight = given.weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    count = min(max(VOCABULARY - rank * rows, 0), rows)
    columns = Columns(rank * rows, count, chunk, dist.group.WORLD)
    return given, given.hidden.requires_grad_(), weight, columns


def gradients_of(hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return gradients: of hidden states summed over ranks, of this rank's weight."""
    assert hidden.grad is not None
    assert weight.grad is not None
    dist.all_reduce(hidden.grad)
    return {"hidden": hidden.grad, "weight": weight.grad}


def on_rank(layout: Layout, chunk: int | None, temperature: float) -> dict[str, Tensor]:
    given, hidden, weight, columns = share_of(layout, chunk)
    found, entropy = token_log_probs(
        hidden, weight, given.targets, columns, temperature=temperature, entropy=True
    )
    assert entropy is not None
    torch.autograd.backward([found, entropy], [given.of_log_probs, given.of_entropy])
    outputs = {"log_probs": found.detach(), "entropy": entropy.detach()}
    return outputs | gradients_of(hidden, weight)


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
def test_without_entropy_the_log_probs_and_their_gradients_are_the_same(chunk: int | None) -> None:
    for right, found in zip(
        run_layout(_without_or_with_entropy, 2, 5, 0.7, True),
        run_layout(_without_or_with_entropy, 2, chunk, 0.7, False),
        strict=True,
    ):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("entropy", "frozen", "room", "times"),
    [
        (False, False, 2, 1),
        (True, False, 2, 1),
        (True, True, 2, 1),
        (False, True, 0, 1),
        (False, False, 0, 2),
        (True, True, 0, 2),
    ],
)
def test_logits_are_computed_again_only_where_they_must_be(
    entropy: bool, frozen: bool, room: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`room` is for one of the two chunks, or for both; results do not depend on it."""
    given, computed, right = inputs(), [], expected(inputs(), 1.0, entropy)
    products, tokens = log_probs.Columns.products, LENGTH * BATCH
    monkeypatch.setattr(
        log_probs.Columns, "products", lambda *a: (computed.append(1), products(*a))[1]
    )
    monkeypatch.setattr(
        log_probs, "_bytes_for_kept_logits", lambda _: room * tokens // 2 * VOCABULARY * 4
    )
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_(not frozen)
    columns = Columns(0, VOCABULARY, chunk=tokens // 2)
    found, entropies = token_log_probs(hidden, weight, given.targets, columns, entropy=entropy)
    outputs = [found] if entropies is None else [found, entropies]
    torch.autograd.backward(outputs, [given.of_log_probs, given.of_entropy][: len(outputs)])
    assert len(computed) == 2 * times
    assert hidden.grad is not None
    check(hidden.grad, right["hidden"])
    if frozen:
        assert weight.grad is None
    else:
        assert weight.grad is not None
        check(weight.grad, right["weight"])


def test_nothing_is_kept_where_no_gradient_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(
        log_probs, "_bytes_for_kept_logits", lambda device: (asked.append(device), 0)[1]
    )
    given = inputs()
    with torch.no_grad():
        token_log_probs(given.hidden, given.weight.requires_grad_(), given.targets, Columns(0, 37))
    token_log_probs(given.hidden, given.weight.detach(), given.targets, Columns(0, 37))
    assert not asked


def _of_frozen_head(layout: Layout, chunk: int | None, temperature: float) -> list[Tensor]:
    """Return gradients of the states, and of an adapter's, twice from the same graph."""
    given, hidden, weight, columns = share_of(layout, chunk)
    x, rows = low_rank(given)
    first = columns.first
    rows = rows[first : first + len(weight)]
    found, _ = token_log_probs(
        hidden,
        weight.detach(),
        given.targets,
        columns,
        temperature=temperature,
        more=[(x.requires_grad_(), rows)],
    )
    gradients = [
        gradient
        for _ in range(2)
        for gradient in torch.autograd.grad(
            found, [hidden, x], given.of_log_probs, retain_graph=True
        )
    ]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def low_rank(given: Inputs) -> tuple[Tensor, Tensor]:
    """Return a term of the logits like an adapter's, (s, B, 3) and (V padded, 3)."""
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(*given.hidden.shape[:2], 3, generator=generator),
        torch.randn(PADDED, 3, generator=generator),
    )


@pytest.mark.parametrize(
    ("tp", "chunk", "temperature"), [(1, 5, 0.7), (1, None, 1.0), (2, 5, 1.3), (4, None, 0.7)]
)
def test_the_states_gradients_under_a_frozen_head_are_torchs(
    tp: int, chunk: int | None, temperature: float
) -> None:
    """They are computed before the tokens' own gradients are known, and scaled by them."""
    given = inputs()
    (x, rows), hidden = low_rank(given), given.hidden.double().requires_grad_()
    x = x.double().requires_grad_()
    logits = hidden @ given.weight.double().t() + x @ rows.double().t()
    every = (logits[..., :VOCABULARY].transpose(0, 1) / temperature).log_softmax(-1)
    found = every.gather(-1, given.targets[..., None])[..., 0]
    right = torch.autograd.grad(found, [hidden, x], given.of_log_probs)
    for rank in run_layout(_of_frozen_head, tp, Layout(tp=tp), chunk, temperature):
        for gradient, other in zip(rank, [*right, *right], strict=True):
            check(gradient, other)


@pytest.mark.parametrize("trained", [False, True])
def test_bf16_keeps_the_gradient_of_a_token_that_is_almost_certain(trained: bool) -> None:
    """Rounded to bf16, its probability would be 1, and the gradient that of other tokens alone."""
    torch.manual_seed(1)
    hidden = torch.eye(40).bfloat16()[:, None].requires_grad_()  # so the logits are the weights
    weight = torch.randn(50, 40)
    weight[range(40), range(40)] += 9 + torch.arange(40) / 8
    weight = weight.bfloat16()
    targets = torch.arange(40)[None]
    found, _ = token_log_probs(hidden, weight.requires_grad_(trained), targets, Columns(0, 50, 7))
    found.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    every = (exact @ weight.detach().double().t()).log_softmax(-1)
    right = every[range(40), 0, range(40)]
    right.sum().backward()
    assert ((right > -0.004) & (right < -1e-6)).sum() >= 20
    assert hidden.grad is not None
    assert exact.grad is not None
    errors = (hidden.grad - exact.grad).norm(dim=-1) / exact.grad.norm(dim=-1)
    assert errors.max() < 2**-6


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
