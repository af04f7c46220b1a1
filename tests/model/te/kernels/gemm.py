"""Matrix products: cuBLAS through ``generic_gemm`` and ``te_general_grouped_gemm``.

Callers ask for column-major products of row-major matrices, so ``A`` is the right factor here.
With a bias and ``grad`` set, they ask for the bias's gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType

TORCH_DTYPE = {int(number): dtype for dtype, number in TE_DType.items()}


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """Return (rows of B, columns of A) after transposition; a plain B keeps its leading axes."""
    a = a.reshape(-1, a.shape[-1])
    if transb:
        b = b.reshape(-1, b.shape[-1]).T
    return b @ (a.T if transa else a)


def _written(result: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return result
    assert out.shape == result.shape, (out.shape, result.shape)
    return out.add_(result) if accumulate else out.copy_(result)


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Compute ``gemm`` of Transformer Engine's ``csrc/extensions/gemm.cpp``."""
    assert quantizer is None
    assert not gelu
    assert comm_overlap is None
    assert alpha == 1.0
    assert beta in (None, 1.0 if accumulate else 0.0)
    result = _product(a, transa, b, transb)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.reshape(-1, b.shape[-1]).sum(0)
    elif bias is not None:
        result = result + bias
    dtype = a.dtype if out_dtype is None else TORCH_DTYPE[int(out_dtype)]
    result = result.to(out.dtype if out is not None else dtype)
    return _written(result, out, accumulate), bias_gradient, None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    transa: bool,
    b: list[Tensor],
    transb: bool,
    out: list[Tensor],
    out_dtype: Any,
    lengths: list[int] | None,
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_input: list[Tensor],
    grad: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """Compute ``te_general_grouped_gemm`` of ``csrc/extensions/gemm.cpp``.

    A single output holds the results one below the other.
    """
    parts = out
    if single_output:
        assert lengths is not None
        parts = list(out[0].split(lengths))
    for number, (left, right, target) in enumerate(zip(a, b, parts, strict=True)):
        result = _product(left, transa, right, transb)
        if bias[number].numel() and grad:
            bias[number].copy_(right.sum(0))
        elif bias[number].numel():
            result = result + bias[number]
        _written(result.to(target.dtype), target, accumulate)
    return bias
