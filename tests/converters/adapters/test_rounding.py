"""The check of merged weights accepts the right update and no wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_qwen3vl.converters.adapters.adapter import Factors, add_update
from tests.converters.adapters.rounding import is_merged

OUT, IN, R, EXPERTS = 24, 24, 4, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [1, EXPERTS])
def test_a_wrong_update_is_told_from_rounding(experts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    right = Factors(draw(R * experts, IN), draw(OUT, R * experts), R, 1.5)
    weight = draw(*(experts, OUT, IN)[experts == 1 :]).to(dtype)
    last = right.b.clone()
    last[-1] = 0
    wrong = {
        "scaling": replace(right, scaling=1.5 * (1 + (1e-5 if dtype == torch.float32 else 0.01))),
        "A and B swapped": replace(right, a=right.b.T.contiguous(), b=right.a.T.contiguous()),
        "a row without it": replace(right, b=last),
        "factors rounded": replace(right, a=right.a.bfloat16(), b=right.b.bfloat16()),
        "a term missing": replace(right, a=right.a * (torch.arange(len(right.a)) % R > 0)[:, None]),
    }
    if experts > 1:
        wrong["experts in the other order"] = replace(right, b=right.b.roll(1, 1))
    for what, factors in ("nothing", right), *wrong.items():
        merged = weight.clone()
        add_update(merged, factors, "", swapped=False)
        assert is_merged(merged, weight, right) == (what == "nothing"), what
