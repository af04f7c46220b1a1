"""Parity multiplies in float32 even where TF32 is allowed, as in NVIDIA's containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mcore_qwen3vl.verify.parity import on_rank
from mcore_qwen3vl.verify.parity.comparison import TOLERANCE
from mcore_qwen3vl.verify.parity.matrix import Matrix, MatrixRow
from tests.verify.parity.tf32 import TF32


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``, also in ranks forked from here."""
    measure = on_rank.measure_on_rank

    def emulated(*args: Any) -> Any:
        with TF32():
            return measure(*args)

    monkeypatch.setattr(on_rank, "measure_on_rank", emulated)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("container")
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_ranks_that_prove_float32_multiply_in_float32(matrix: Matrix, model: str) -> None:
    matrix.compare_row(MatrixRow(model, "single", ("mixed",))).require()


@pytest.mark.usefixtures("container")
def test_tf32_is_far_off(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_rank, "_multiply_exactly", lambda case: {})
    report = matrix.compare_row(MatrixRow("dense", "single", ("mixed",)))
    worst = {part: summary.worst.relative_error for (_, part), summary in report.parts().items()}
    print(worst)
    assert worst["logits"] > 5 * TOLERANCE
    assert worst["gradients"] > 5 * TOLERANCE
