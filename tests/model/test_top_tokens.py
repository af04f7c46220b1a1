"""Log-probabilities of a few tokens and of the rest equal those of PyTorch from all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.log_probs import Columns
from mcore_qwen3vl.model.top_tokens import FLOOR, likeliest, log_probs_of
from mcore_qwen3vl.runtime.launch import run_layout
from tests.model.test_log_probs import VOCABULARY, Inputs, check, gradients_of, inputs, share_of

K, TEMPERATURE = 6, 1.7


def teacher(given: Inputs) -> Tensor:
    """Return ids (B, s, K), among which the target sometimes is."""
    generator = torch.Generator().manual_seed(3)
    shape = (*given.targets.shape, VOCABULARY)
    return torch.rand(shape, generator=generator).argsort(-1)[..., :K]


def of_outputs(given: Inputs) -> Tensor:
    """Return incoming gradients (B, s, K + 1) of the log-probabilities."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*given.targets.shape, K + 1, generator=generator)


def with_rest(every: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of `ids` and of the rest, from those of all tokens."""
    rest = torch.ones_like(every, dtype=torch.bool).scatter(-1, ids, False)
    of_rest = every.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([every.gather(-1, ids), of_rest], -1)


def expected_of_few(given: Inputs) -> dict[str, Tensor]:
    hidden, weight = (t.double().requires_grad_() for t in (given.hidden, given.weight))
    logits = (hidden @ weight[:VOCABULARY].t()).transpose(0, 1)
    found = with_rest((logits / TEMPERATURE).log_softmax(-1), teacher(given))
    targets = logits.log_softmax(-1).gather(-1, given.targets[..., None])[..., 0]
    torch.autograd.backward([found, targets], [of_outputs(given), given.of_log_probs])
    assert hidden.grad is not None
    assert weight.grad is not None
    likeliest = (logits / TEMPERATURE).topk(K).indices
    return {
        "found": found.detach(),
        "targets": targets.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
        "likeliest": likeliest,
        "likely": with_rest((logits / TEMPERATURE).log_softmax(-1), likeliest).detach(),
    }


def few_on_rank(layout: Layout, chunk: int | None) -> dict[str, Tensor]:
    given, *logits = share_of(layout, chunk)
    ids, likely = likeliest(*logits, k=K, temperature=TEMPERATURE)
    found, targets = log_probs_of(
        *logits, ids=teacher(given), targets=given.targets, temperature=TEMPERATURE
    )
    torch.autograd.backward([found, targets], [of_outputs(given), given.of_log_probs])
    outputs = {"found": found.detach(), "targets": targets.detach()}
    return outputs | {"likeliest": ids, "likely": likely} | gradients_of(*logits[:2])


@pytest.mark.parametrize(("tp", "chunk"), [(1, None), (1, 5), (2, 5), (4, None), (8, 3)])
def test_a_few_tokens_and_the_rest_equal_torch(tp: int, chunk: int | None) -> None:
    """With TP 4 and 8 some ranks have only padding, and with TP 8 no rank has K columns more."""
    right = expected_of_few(inputs())
    ranks = run_layout(few_on_rank, tp, Layout(tp=tp), chunk)
    for rank in ranks:
        assert torch.equal(rank["likeliest"], right["likeliest"])
        for name in ("found", "targets", "likely", "hidden"):
            check(rank[name], right[name])
    check(torch.cat([rank["weight"] for rank in ranks]), right["weight"])


def test_a_rest_that_is_unlikely_or_empty_is_finite() -> None:
    """The rest is one in 1e9, then less than any float32, then nothing."""
    for gap, k in ((21.0, 2), (200.0, 2), (21.0, 5)):
        logits = torch.tensor([0.0, -gap, -1.0, -gap - 1, -gap - 2])
        hidden, weight = torch.ones(1, 1, 1), logits[:, None].clone().requires_grad_()
        ids, likely = likeliest(hidden, weight, Columns(0, 5), k=k)
        found, _target = log_probs_of(
            hidden, weight, Columns(0, 5), ids=ids, targets=torch.zeros(1, 1, dtype=torch.int64)
        )
        right = logits.double().requires_grad_()
        exact = with_rest(right.log_softmax(-1), ids[0, 0])
        torch.testing.assert_close(found, likely)
        torch.testing.assert_close(found[0, 0], exact.float().clamp(min=FLOOR))
        found[..., -1].sum().backward()
        assert weight.grad is not None
        if k == 2:
            exact[-1].clamp(min=FLOOR).backward()
            torch.testing.assert_close(weight.grad[:, 0].double(), right.grad, rtol=1e-5, atol=1e-6)
        else:
            assert not weight.grad.any()
