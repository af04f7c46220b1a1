"""Parity multiplies in float32 even where TF32 is allowed, as in NVIDIA's containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_qwen3vl.verification.parity import on_rank
from mcore_qwen3vl.verification.parity.comparison import TOLERANCE
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_LOST = 13  # bits of float32's 23 bits of mantissa


def rounded(x: Any) -> Any:
    """Round float32 to the nearest value with TF32's ten bits of mantissa."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32) + (1 << (_LOST - 1))
    return (bits >> _LOST << _LOST).view(torch.float32)


class TF32(TorchDispatchMode):
    """A mode that rounds the factors of products where PyTorch's settings let a GPU do so."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        products = packet in _PRODUCTS and torch.get_float32_matmul_precision() != "highest"
        if products or (packet in _CONVOLUTIONS and torch.backends.cudnn.allow_tf32):
            args = tuple(map(rounded, args))
        return func(*args, **(kwargs or {}))


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
    monkeypatch.setattr(on_rank, "_forbid_tf32", lambda case: {})
    report = matrix.compare_row(MatrixRow("dense", "single", ("mixed",)))
    worst = {part: summary.worst.relative_error for (_, part), summary in report.parts().items()}
    print(worst)
    assert worst["logits"] > 5 * TOLERANCE
    assert worst["gradients"] > 5 * TOLERANCE
