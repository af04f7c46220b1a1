"""The kernels of the tower's rotary embedding do what their eager twins do, as Triton interprets
them.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.kernels.qkv_rotary import rotary_gradient_eagerly, rotate_in_place_eagerly
from tests.kernels.interpreted import interpreted_json

CASES = [
    (dtype, tokens, heads, width)
    for dtype in ("float32", "bfloat16")
    for tokens, heads, width in ((7, 3, 10), (19, 5, 64))
]


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join(map(str, case))


def measure(dtype: str, tokens: int, heads: int, width: int) -> dict[str, Any]:
    """Return the largest errors of kernels and twins, and whether the values stayed."""
    from mcore_qwen3vl.kernels import qkv_rotary_triton

    qkv_rotary_triton.TILE = 256  # several programs
    torch.manual_seed(tokens)
    qkv, more = torch.randn(2, tokens, 3, heads, width).to(getattr(torch, dtype)).unbind()
    angles = torch.randn(tokens, width)  # of which the first half is used
    cos, sin = angles.cos()[:, : width // 2], angles.sin()[:, : width // 2]
    right = torch.cat([_turned(qkv[:, :2], cos, sin), qkv[:, 2:].double()], 1)
    back = torch.cat([_turned(more[:, :2], cos, -sin), more[:, 2:].double()], 1)
    kernels = qkv_rotary_triton.OPERATORS

    def errors(rotate: Any, gradient: Any) -> list[float]:
        turned = qkv.clone()
        rotate(turned[:, :2], cos, sin)
        assert torch.equal(turned[:, 2], qkv[:, 2])
        given = gradient(*more.unbind(1), cos, sin)
        assert torch.equal(given[:, 2], more[:, 2])
        return [float((a - b).abs().max()) for a, b in ((turned, right), (given, back))]

    return {
        "kernel": errors(kernels.rotate_qk, kernels.rotary_gradient),
        "eager": errors(rotate_in_place_eagerly, rotary_gradient_eagerly),
    }


def _turned(pair: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `pair` (n, 2, heads, D), turned as complex numbers."""
    first, second = pair.double().chunk(2, -1)
    turns = torch.complex(cos.double(), sin.double())[:, None, None]
    turned = torch.complex(first, second) * turns
    return torch.cat([turned.real, turned.imag], -1)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return interpreted_json(__file__)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_kernel_does_what_its_eager_twin_does(
    case: tuple[Any, ...], measured: dict[str, Any]
) -> None:
    found = measured[name_of(case)]
    limit = 2e-6 if case[0] == "float32" else 2**-5  # a unit of values of up to eight
    assert all(error < limit for error in (*found["kernel"], *found["eager"]))


if __name__ == "__main__":
    print(json.dumps({name_of(case): measure(*case) for case in CASES}))
