"""The kernel of GELU's gradient does what its eager twin does, as Triton interprets it.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore_qwen3vl.kernels.gelu import gelu_gradient_eagerly
from tests.kernels.interpreted import interpreted_json

CASES = [(dtype, rows, c) for dtype in ("float32", "bfloat16") for rows, c in ((37, 150), (3, 9))]


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join(map(str, case))


def measure(dtype: str, rows: int, columns: int) -> dict[str, Any]:
    """Return the largest errors of the kernel and of its twin, against autograd's in float64."""
    from mcore_qwen3vl.kernels import gelu_triton

    gelu_triton.ROWS, gelu_triton.GROUPS = 4, 3  # a program has several tiles
    torch.manual_seed(rows)
    inputs, gradient = (3 * torch.randn(2, rows, columns)).to(getattr(torch, dtype)).unbind()
    exact = inputs.double().requires_grad_()
    activated = F.gelu(exact, approximate="tanh")
    (of_inputs,) = torch.autograd.grad(activated, exact, gradient.double())
    right = of_inputs, of_inputs.sum(0), activated.detach()

    def errors(function: Any) -> list[float]:
        pairs = zip(function(gradient, inputs), right, strict=True)
        return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]

    return {
        "kernel": errors(gelu_triton.OPERATORS.gelu_gradient),
        "eager": errors(gelu_gradient_eagerly),
    }


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return interpreted_json(__file__)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_kernel_does_what_its_eager_twin_does(
    case: tuple[Any, ...], measured: dict[str, Any]
) -> None:
    found = measured[name_of(case)]
    exact = case[0] == "float32"
    assert all(error < (2e-6 if exact else 2**-7) for error in found["eager"])
    assert all(error < (2e-6 if exact else 2**-7) for error in found["kernel"])


if __name__ == "__main__":
    print(json.dumps({name_of(case): measure(*case) for case in CASES}))
