"""The losses of embeddings and their gradients are those of sentence-transformers: `make test-trl`.

The package is no dependency of the tests, because it brings a training stack of its own; without it
those tests are skipped, and the formula written out is compared alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.losses.embedding import Contrastive, contrastive_losses
from tests.losses.retrieval import formula

TOLERANCE = 2e-5
WIDTH = 24
SCORES = torch.tensor([0.3, 0.9, 0.3, 0.0, 0.55])
PAIRS = [
    Contrastive(kind="cosine"),
    Contrastive(kind="cosent"),
    Contrastive(0.3, (4, 9, WIDTH), "cosent"),
]
CASES = [Contrastive(), Contrastive(0.3), Contrastive(0.1, (4, 9, WIDTH))]


def texts(groups: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(groups), WIDTH, generator=generator).requires_grad_()


def compare(
    groups: tuple[int, ...],
    contrastive: Contrastive,
    right: Tensor,
    of: Tensor,
    scores: Tensor | None = None,
) -> None:
    """Compare our mean loss and its gradient with `right` and its gradient for `of`."""
    (expected,) = torch.autograd.grad(right, of)
    ours = texts(groups)
    loss = contrastive_losses(ours, groups, contrastive, scores).mean()
    (found,) = torch.autograd.grad(loss, ours)
    torch.testing.assert_close(loss, right, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())
    )


@pytest.mark.parametrize("contrastive", CASES, ids=str)
@pytest.mark.parametrize("groups", [(2, 2, 2), (2, 5, 3, 2)])
def test_losses_and_gradients_are_those_of_the_formula(
    groups: tuple[int, ...], contrastive: Contrastive
) -> None:
    of = texts(groups)
    compare(groups, contrastive, formula([list(g) for g in of.split(groups)], contrastive), of)


@pytest.mark.parametrize("contrastive", CASES, ids=str)
@pytest.mark.parametrize("group", [2, 4])
def test_losses_and_gradients_are_those_of_sentence_transformers(
    group: int, contrastive: Contrastive
) -> None:
    """Its records all have the same number of negatives."""
    theirs = pytest.importorskip("sentence_transformers.losses")
    loss = theirs.MultipleNegativesRankingLoss(model=None, scale=1 / contrastive.temperature)
    of = texts((group,) * 5)
    columns = list(of.view(5, group, WIDTH).unbind(1))
    right = sum(
        (
            loss.compute_loss_from_embeddings([c[:, :size] for c in columns], None)
            for size in contrastive.dimensions or (WIDTH,)
        ),
        torch.zeros([]),
    )
    compare((group,) * 5, contrastive, right, of)


@pytest.mark.parametrize("contrastive", PAIRS, ids=str)
def test_losses_of_pairs_are_those_of_the_formula(contrastive: Contrastive) -> None:
    of = texts((2,) * 5)
    groups = [list(group) for group in of.split(2)]
    compare((2,) * 5, contrastive, formula(groups, contrastive, SCORES.tolist()), of, SCORES)


@pytest.mark.parametrize("contrastive", PAIRS, ids=str)
def test_losses_of_pairs_are_those_of_sentence_transformers(contrastive: Contrastive) -> None:
    theirs = pytest.importorskip("sentence_transformers.losses")
    model: Any = torch.nn.Identity()  # their losses keep it, and take embeddings
    if contrastive.kind == "cosine":
        loss = theirs.CosineSimilarityLoss(model)
    else:
        loss = theirs.CoSENTLoss(model, scale=1 / contrastive.temperature)
    of = texts((2,) * 5)
    right = sum(
        (
            loss.compute_loss_from_embeddings([of[::2, :size], of[1::2, :size]], SCORES)
            for size in contrastive.dimensions or (WIDTH,)
        ),
        torch.zeros([]),
    )
    compare((2,) * 5, contrastive, right, of, SCORES)


@pytest.mark.parametrize("kind", ["infonce", "cosine", "cosent"])
def test_a_step_without_a_record_that_can_be_used_has_no_losses(kind: Any) -> None:
    embeddings = torch.zeros(0, 6, requires_grad=True)
    scores = None if kind == "infonce" else torch.zeros(0)
    losses = contrastive_losses(embeddings, [], Contrastive(kind=kind), scores)
    (gradient,) = torch.autograd.grad(losses.sum(), embeddings)
    assert (losses.shape, gradient.shape) == ((0,), (0, 6))
