"""What a safetensors header says about a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_qwen3vl.converters.storage.boxes import Shape

FP8 = torch.float8_e4m3fn

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""safetensors' names of the dtypes that are not quantised."""

DTYPES = FLOATS | {"F8_E4M3": FP8}
"""safetensors' names of the dtypes that a Qwen3-VL checkpoint may hold."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header declares it.

    Attributes:
        name: name of the tensor in the file.
        file: name of the file that holds the tensor.
        dtype: default dtype of what `HuggingFaceCheckpoint.read` returns.
        shape: shape of the tensor.
        stored: dtype in the file; differs from `dtype` if the tensor is quantised.
        scale: name of the tensor that holds a quantised tensor's factors, else None.
    """

    name: str
    file: str
    dtype: torch.dtype
    shape: Shape
    stored: torch.dtype
    scale: str | None = None
