"""dtypes: the names that commands use, torch's names, and casts that lose no finite value."""

from __future__ import annotations

import torch

from mcore_qwen3vl.errors import BadInput

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not result.isfinite().all():
        overflow = result.isinf() & tensor.isfinite()
        if overflow.any():
            raise BadInput(
                f"tensor {name} holds {tensor[overflow].abs().max():.3g}, more than "
                f"{dtype_name(dtype)} can represent. Convert with --dtype keep or bf16."
            )
    return result
