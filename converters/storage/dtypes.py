"""dtypes: their names in commands, files and pickles, and casts that lose no finite value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mcore_qwen3vl.errors import BadInput


class ModelDtype(NamedTuple):
    """One dtype that a model's tensors may have, and what it is called.

    Attributes:
        dtype: torch's.
        option: what commands call it.
        safetensors: what safetensors files call it.
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
"""By what commands call them."""


def parse_dtype(name: str) -> torch.dtype | None:
    """None for "keep".

    Raises:
        BadInput: an unknown name.
    """
    if name == "keep":
        return None
    if name not in DTYPES:
        raise BadInput(f"dtype {name!r} is not one of keep, {', '.join(DTYPES)}.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`tensor` as `dtype`, the same object if it has it already.

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
    """Whether no value is NaN or infinite; in a twentieth of the time of ``isfinite().all()``."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # NaN if any value is
    return bool(low.isfinite() & high.isfinite())
