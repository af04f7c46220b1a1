"""The kernels of log-probabilities do what their eager twins do, as Triton interprets them.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.kernels.log_probs import reduce_logits_eagerly, write_gradient_eagerly
from tests.docs.markdown import ROOT

TOKENS, WIDE = 5, 2 * 4096 + 809  # three blocks of columns, the last one in part
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
CASES = [
    (dtype, columns, temperature, entropy)
    for dtype in ("float32", "bfloat16")
    for columns, temperature in ((WIDE, 1.0), (37, 0.7))
    for entropy in (False, True)
]


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join(map(str, case))


def measure(dtype: str, columns: int, temperature: float, entropy: bool) -> dict[str, Any]:
    """Return the largest errors of the kernels; nan if one is no number."""
    from mcore_qwen3vl.kernels.log_probs_triton import OPERATORS

    torch.manual_seed(columns)
    # Rows are further apart than they are long, as in a part of a larger tensor.
    logits = (6 * torch.randn(TOKENS, columns + 3)).to(getattr(torch, dtype))[:, :columns]
    targets = torch.randint(columns, (TOKENS,))
    targets[1] = columns - 1
    reduced = []
    for function in (reduce_logits_eagerly, OPERATORS.reduce_logits):
        maximum, sums = torch.full((TOKENS,), -7.0), torch.full((3, TOKENS + 2), -7.0)
        function(logits, targets, temperature, maximum, sums[:, 1:-1], entropy)
        assert (sums[:, [0, -1]] == -7).all()
        reduced.append(torch.cat([maximum[None], sums[:, 1:-1]]))
    right, found = reduced
    total = right[0] + right[1].log()
    of_log_probs, of_target, of_entropies = torch.randn(3, TOKENS)
    for gradient in (of_log_probs, of_target, of_entropies):
        gradient[2] = 0  # a token that does not count
    numbers: list[Any] = [total, of_log_probs, of_target, None, None]
    if entropy:
        numbers[3:] = [of_entropies, right[1].log() - right[3] / right[1]]
    exact = _gradient(logits.double(), targets, temperature, *numbers)
    kernel, eager = (torch.nn.functional.pad(logits, (0, 3))[:, :columns] for _ in range(2))
    write_gradient_eagerly(eager, targets, temperature, *numbers)
    OPERATORS.write_gradient(kernel, targets, temperature, *numbers)
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    return {
        "reduction": _worst((found - right).abs() / right.abs().clamp(min=1)),
        "kernel": _worst((kernel - exact).abs() / largest),
        "eager": _worst((eager - exact).abs() / largest),
        "of no weight": _worst(kernel[2].abs()),
    }


def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    total: Tensor,
    of_log_probs: Tensor,
    of_target: Tensor,
    of_entropies: Tensor | None = None,
    entropies: Tensor | None = None,
) -> Tensor:
    """Return the documented formula in float64."""
    shifted = logits / temperature - total.double()[:, None]
    gradient = -of_log_probs[:, None] * shifted.exp()
    if of_entropies is not None and entropies is not None:
        more = shifted + entropies.double()[:, None]
        gradient = gradient - of_entropies[:, None] * shifted.exp() * more
    return gradient.index_put((torch.arange(TOKENS), targets), of_target.double(), accumulate=True)


def _worst(errors: Tensor) -> float:
    return float(errors.double().max())  # of which nan is the largest


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """Run this file in a process of its own: Triton looks at the variable when it is imported."""
    words = [sys.executable, str(Path(__file__))]
    done = subprocess.run(words, env=INTERPRETED, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_kernel_does_what_its_eager_twin_does(
    case: tuple[Any, ...], measured: dict[str, dict[str, float]]
) -> None:
    found = measured[name_of(case)]
    assert found["reduction"] < 3e-6
    assert found["eager"] < (2e-6 if case[0] == "float32" else 2**-8)
    assert found["kernel"] < (2e-6 if case[0] == "float32" else 2**-7)
    assert found["of no weight"] == 0


@pytest.mark.slow
def test_the_head_with_these_kernels_equals_torch() -> None:
    """Values and gradients, with TP, entropies, chunks, temperatures and a frozen head."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        str(ROOT / "tests" / "model" / "test_log_probs.py"),
    ]
    words += ["-k", "torch and not few or entropy or again or frozen"]
    done = subprocess.run(words, env=INTERPRETED, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


if __name__ == "__main__":
    print(json.dumps({name_of(case): measure(*case) for case in CASES}))
