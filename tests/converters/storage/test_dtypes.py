"""Casts lose no finite value."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.converters.storage.dtypes import DTYPES, all_finite, cast
from mcore_qwen3vl.errors import BadInput


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    for size in (1, 7, 64, 1003):
        assert all_finite(torch.randn(size).to(dtype))
        for place in {0, size // 2, size - 1}:
            tensor = torch.randn(size).to(dtype)
            tensor[place] = value
            assert not all_finite(tensor), (size, place)
    assert all_finite(torch.empty(0, dtype=dtype))


def test_a_cast_that_overflows() -> None:
    kept = torch.tensor([1.0, float("inf"), float("nan")])
    assert cast(kept, torch.float16, "x").isinf().tolist() == [False, True, False]
    with pytest.raises(BadInput, match=r"tensor x holds 7e\+04, more than float16"):
        cast(torch.tensor([1.0, 7e4]), torch.float16, "x")
    with pytest.raises(BadInput, match="more than bfloat16"):
        cast(torch.tensor([torch.finfo(torch.float32).max]), torch.bfloat16, "x")
