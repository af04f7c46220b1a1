"""The kernels of permutation do what their eager twins do, as Triton interprets them.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.kernels.permutation import (
    order_by_expert_eagerly,
    sum_rows_eagerly,
    zero_empty_eagerly,
)
from tests.kernels.interpreted import interpreted_json

SHAPES = [(29, 6, 3, True), (29, 6, 3, False), (3, 37, 5, True), (40, 1, 1, False)]
DTYPES = ["float32", "bfloat16"]


def choices(tokens: int, experts: int, most: int, all_take: bool) -> Tensor:
    """Return (tokens, experts) bool: `most` a token, or also fewer; the last expert has none."""
    torch.manual_seed(tokens)
    scores = torch.rand(tokens, experts)
    if experts > most:
        scores[:, -1] = -1
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(most).indices, True)
    return chosen if all_take else chosen & (torch.rand(tokens, experts) < 0.6)


def measure_order(tokens: int, experts: int, most: int, all_take: bool) -> list[bool]:
    """Return whether each tensor of the order is that of the eager twin."""
    from mcore_qwen3vl.kernels import permutation_triton

    permutation_triton.TILE, permutation_triton.BLOCKS = 32, 2  # several programs and blocks
    chosen = choices(tokens, experts, most, all_take)
    arguments = chosen, most, int(chosen.sum())
    pairs = zip(
        permutation_triton.OPERATORS.order_by_expert(*arguments),
        order_by_expert_eagerly(*arguments),
        strict=True,
    )
    return [torch.equal(found, wanted) for found, wanted in pairs]


def measure_sums(dtype: str) -> dict[str, float]:
    """Return the largest errors of the sums, and how many values are not zeroed as they should."""
    from mcore_qwen3vl.kernels import permutation_triton

    permutation_triton.COLUMNS, permutation_triton.ZEROED = 16, 8
    kernels = permutation_triton.OPERATORS
    chosen = choices(29, 6, 3, False)
    *_, rows, counts = order_by_expert_eagerly(chosen, 3, int(chosen.sum()))
    values = torch.randn(int(chosen.sum()), 37).to(getattr(torch, dtype))
    exact = torch.stack([values.double()[row[row >= 0]].sum(0) for row in rows])
    gradients = torch.randn(6, 5, 47).to(values.dtype)
    zeroed, same = gradients.clone(), gradients.clone()
    kernels.zero_empty(zeroed, counts)
    zero_empty_eagerly(same, counts)
    return {
        "kernel": _worst(kernels.sum_rows(values, rows), exact),
        "eager": _worst(sum_rows_eagerly(values, rows), exact),
        "zeroed": float((zeroed != same).sum()),
        "empty": float((zeroed == 0).all(-1).all(-1).sum()),
    }


def _worst(found: Tensor, exact: Tensor) -> float:
    """Return the largest error, relative to values above one."""
    return float(((found - exact).abs() / exact.abs().clamp(min=1)).max())


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return interpreted_json(__file__)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_is_that_of_a_sort(shape: tuple[Any, ...], measured: dict[str, Any]) -> None:
    assert measured[str(shape)] == [True] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_and_empty_matrices_zeroed(dtype: str, measured: dict[str, Any]) -> None:
    found = measured[dtype]
    exact = dtype == "float32"
    assert found["eager"] <= (1e-6 if exact else 2**-8)  # half a unit
    assert found["kernel"] < (1e-6 if exact else 2**-7)
    assert found["zeroed"] == 0
    assert found["empty"] == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_of_the_eager_twin(shape: tuple[Any, ...]) -> None:
    chosen = choices(*shape)
    tokens, entries, rows, counts = order_by_expert_eagerly(chosen, shape[2], int(chosen.sum()))
    pairs = chosen.t().nonzero()  # (n, 2): expert and token, in that order
    assert torch.equal(tokens, pairs[:, 1])
    assert torch.equal(entries, pairs[:, 1] * shape[1] + pairs[:, 0])
    assert torch.equal(counts, chosen.sum(0))
    for token, of_token in enumerate(rows):
        assert of_token[of_token >= 0].tolist() == (tokens == token).nonzero().flatten().tolist()


if __name__ == "__main__":
    found: dict[str, Any] = {str(shape): measure_order(*shape) for shape in SHAPES}
    print(json.dumps(found | {dtype: measure_sums(dtype) for dtype in DTYPES}))
