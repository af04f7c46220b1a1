"""B factors are placed in one matrix, and its gradients reach each factor."""

from __future__ import annotations

import torch

from mcore_qwen3vl.model.lora_modules import Kind, Pair, Place, Site

SHAPES = ((4, 2), (2, 3))


def site(rows: list[int], *shapes: tuple[int, int]) -> Site:
    like = torch.ones(1)
    pairs = [
        Pair(str(i), Place((r, 7), None), Place((out, r), None), scaling=1.0, like=like)
        for i, (out, r) in enumerate(shapes)
    ]
    return Site(pairs, torch.tensor(rows), Kind(None, None), None)


# A fused linear has the rows q q k v | q q k v, where k has no adapter, and one row of padding.
FUSED = site([0, 1, -1, 4, 2, 3, -1, 5, -1], *SHAPES)


def test_rows_lie_where_the_fused_linear_has_them() -> None:
    q, v = torch.arange(1.0, 9.0).view(4, 2), torch.arange(10.0, 16.0).view(2, 3)
    expected = torch.zeros(9, 5)
    expected[[0, 1, 4, 5], :2] = q
    expected[[3, 7], 2:] = v
    assert torch.equal(FUSED.matrix([q, v]), expected)


def test_gradients_come_back_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in SHAPES)
    weights = torch.randn(9, 5, generator=generator)
    (FUSED.matrix([q, v]) * weights).sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert torch.equal(q.grad, weights[[0, 1, 4, 5], :2])
    assert torch.equal(v.grad, weights[[3, 7], 2:])


def test_one_factor_that_is_everything_is_not_copied() -> None:
    b = torch.ones(4, 2)
    assert site([0, 1, 2, 3], (4, 2)).matrix([b]) is b
    assert site([0, 1, 2, 3, -1], (4, 2)).matrix([b]).shape == (5, 2)


def test_a_factor_may_have_no_row_on_a_rank() -> None:
    q, v = torch.ones(2, 2, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    matrix = site([0, 1], (2, 2), (0, 3)).matrix([q, v])
    assert torch.equal(matrix, torch.tensor([[1.0, 1, 0, 0, 0]] * 2))
    matrix.sum().backward()
    assert v.grad is not None
    assert v.grad.shape == (0, 3)
