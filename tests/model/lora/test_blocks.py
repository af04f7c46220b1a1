"""B factors are placed in one matrix, and its gradients reach each factor."""

from __future__ import annotations

import torch

from mcore_qwen3vl.model.lora.site import Blocks

# A fused linear has the rows q q k v | q q k v, where k has no adapter, and one row of padding.
BLOCKS = Blocks(
    rows=9,
    shapes=((4, 2), (2, 3)),
    placed=((0, 0, 0, 2), (3, 1, 0, 1), (4, 0, 2, 2), (7, 1, 1, 1)),
)


def test_rows_lie_where_the_fused_linear_has_them() -> None:
    q, v = torch.arange(1.0, 9.0).view(4, 2), torch.arange(10.0, 16.0).view(2, 3)
    expected = torch.zeros(9, 5)
    expected[[0, 1, 4, 5], :2] = q
    expected[[3, 7], 2:] = v
    assert torch.equal(BLOCKS.matrix([q, v]), expected)


def test_gradients_come_back_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in BLOCKS.shapes)
    weights = torch.randn(9, 5, generator=generator)
    (BLOCKS.matrix([q, v]) * weights).sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert torch.equal(q.grad, weights[[0, 1, 4, 5], :2])
    assert torch.equal(v.grad, weights[[3, 7], 2:])


def test_one_factor_that_is_everything_is_not_copied() -> None:
    b = torch.ones(4, 2)
    assert Blocks(4, ((4, 2),), ((0, 0, 0, 4),)).matrix([b]) is b
    assert Blocks(5, ((4, 2),), ((0, 0, 0, 4),)).matrix([b]).shape == (5, 2)


def test_a_factor_may_have_no_row_on_a_rank() -> None:
    blocks = Blocks(2, ((2, 2), (0, 3)), ((0, 0, 0, 2),))
    q, v = torch.ones(2, 2, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    matrix = blocks.matrix([q, v])
    assert torch.equal(matrix, torch.tensor([[1.0, 1, 0, 0, 0]] * 2))
    matrix.sum().backward()
    assert v.grad is not None
    assert v.grad.shape == (0, 3)
