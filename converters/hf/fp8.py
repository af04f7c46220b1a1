"""Quantised Hugging Face checkpoints: one kind is read, every other is refused by name.

Read is FP8 as Qwen publishes it: ``quant_method: fp8`` in ``config.json``, weights as
float8_e4m3fn, and for each of them a tensor ``<name>_scale_inv`` with one factor for each block of
128 x 128 values (the last blocks may be cut short); fused experts have a grid of factors for each
expert. A value is the stored number times its block's factor, multiplied in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_qwen3vl.converters.hf.header import FP8, TensorHeader
from mcore_qwen3vl.converters.storage.dtypes import cast, dtype_name
from mcore_qwen3vl.errors import BadInput

BLOCK = 128
SUFFIX = "_scale_inv"
DEQUANTIZED = torch.bfloat16
"""dtype of what was FP8, unless another is asked for."""

SCALES = (torch.bfloat16, torch.float16, torch.float32)

UNDERSTOOD = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "float",
    "expert_dtype": "fp8",
}
"""``quantization_config``; the first two must be there."""

SKIPPED = ("modules_to_not_convert", "ignored_layers")
"""Fields of ``quantization_config`` with the modules that are left as they were."""

LEFTOVER = re.compile(
    r"(weight|input|output|activation|[qkv])_(scale|zero_point)(_\d)?$|_scale_inv$|_scales?$"
    r"|\.(scales|biases|qweight|qzeros|g_idx|SCB|weight_packed|weight_shape|weight_format|absmax)$"
    r"|\.(quant_state|quant_map|nested_|weight\.)"
)
"""Names of what quantisers store beside weights."""

_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``quantization_config`` that a ``config.json`` holds, once it is one that is understood.

    Raises:
        BadInput: it is another; the message names what it says.
    """
    sections = (config, config.get("text_config"), config.get("vision_config"))
    found = [
        section[key]
        for section in sections
        if isinstance(section, dict)
        for key in ("quantization_config", "compression_config")
        if section.get(key)
    ]
    if not found:
        return None
    quantization = found[0]
    if not isinstance(quantization, dict) or any(other != quantization for other in found):
        raise BadInput(
            "config.json holds several quantization_config objects that differ, or one that is "
            "not an object."
        )
    for key, wanted in UNDERSTOOD.items():
        said = quantization.get(key)
        if said != wanted and (said is not None or key in ("quant_method", "weight_block_size")):
            raise BadInput(
                f"config.json says that the checkpoint is quantised with {key} {said!r}. Only "
                f"bf16, fp16, fp32, and fp8 with factors for blocks of {BLOCK} x {BLOCK} ({key} "
                f"{wanted!r}) can be read. Convert the model's original checkpoint."
            )
    if not all(isinstance(quantization.get(key) or [], list) for key in SKIPPED):
        raise BadInput(
            f"config.json: {' or '.join(SKIPPED)} in its quantization_config is not a list."
        )
    return quantization


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as a checkpoint has it that is not quantised."""
    keys = ("quantization_config", "compression_config")
    return {
        name: without(value) if name in ("text_config", "vision_config") else value
        for name, value in config.items()
        if name not in keys
    }


def pair(
    stored: Mapping[str, TensorHeader], quantization: Mapping[str, Any] | None
) -> tuple[dict[str, TensorHeader], dict[str, TensorHeader]]:
    """Give each FP8 tensor its factors.

    Args:
        stored: every tensor as the files have it.
        quantization: what `declared` found.

    Returns:
        The model's tensors, those in FP8 with `scale` set and with the dtype they are read as; and
        the factors' own entries.

    Raises:
        BadInput: FP8 without factors or declaration, factors of another shape, or tensors that
            belong to another quantisation.
    """
    tensors, scales = {}, {}
    for name, entry in stored.items():
        if entry.stored == FP8:
            scale = f"{name}{SUFFIX}"
            _check(name, entry, scale, stored.get(scale), quantization)
            tensors[name] = replace(entry, dtype=DEQUANTIZED, scale=scale)
            scales[scale] = stored[scale]
    for name, entry in stored.items():
        if name in tensors or name in scales:
            continue
        if LEFTOVER.search(name):
            raise BadInput(
                f"tensor {name} {list(entry.shape)} ({dtype_name(entry.stored)}) belongs to a "
                "quantised checkpoint of a kind that is not understood. Convert the model's "
                "original checkpoint."
            )
        tensors[name] = entry
    return {name: tensors[name] for name in stored if name in tensors}, scales


def dequantize(
    stored: Tensor,
    factors: Tensor,
    rows: slice,
    columns: slice,
    dtype: torch.dtype,
    name: str,
) -> Tensor:
    """Values of a box of one FP8 matrix, or of several that are stacked.

    Args:
        stored: (..., rows, columns), float8_e4m3fn.
        factors: (..., all rows / 128, all columns / 128), rounded up: of the whole matrices.
        rows, columns: where in its matrix the box lies.
        dtype: of the result.
        name: for messages.

    Raises:
        BadInput: a factor is not finite, or a value does not fit `dtype`.
    """
    result = torch.empty(stored.shape, dtype=dtype)
    across = torch.arange(columns.start, columns.stop) // BLOCK
    for matrix, grid, out in zip(*map(_matrices, (stored, factors, result)), strict=True):
        if not grid.isfinite().all():
            raise BadInput(f"tensor {name}{SUFFIX} holds a factor that is not finite.")
        for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            first = max(block * BLOCK - rows.start, 0)
            part = matrix[first : (block + 1) * BLOCK - rows.start]
            # torch converts from FP8 several times slower than numpy looks values up.
            values = torch.from_numpy(np.take(_VALUES, part.view(torch.uint8).numpy()))
            values *= grid[block].float()[across]
            out[first : first + len(part)] = cast(values, dtype, name)
    return result


def _matrices(tensor: Tensor) -> Iterable[Tensor]:
    return [tensor] if tensor.ndim == 2 else tensor


def _check(
    name: str,
    entry: TensorHeader,
    scale: str,
    factors: TensorHeader | None,
    quantization: Mapping[str, Any] | None,
) -> None:
    if quantization is None:
        raise BadInput(
            f"tensor {name} is {dtype_name(FP8)}, but config.json has no quantization_config. "
            "Restore the config.json that was saved with the weights."
        )
    if factors is None:
        raise BadInput(
            f"tensor {name} is {dtype_name(FP8)}, but there is no {scale} with its factors."
        )
    *stack, rows, columns = entry.shape if len(entry.shape) > 1 else (0, 0)
    grid = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    if factors.shape != grid or factors.stored not in SCALES:
        raise BadInput(
            f"tensor {scale} has shape {list(factors.shape)} ({dtype_name(factors.stored)}); "
            f"{name} {list(entry.shape)} in blocks of {BLOCK} x {BLOCK} has {list(grid)} factors. "
            "Another kind of quantisation is not read."
        )
    for module in (module for key in SKIPPED for module in quantization.get(key) or ()):
        if name == module or name.startswith(f"{module}."):
            raise BadInput(
                f"config.json says that {module} is not quantised, but tensor {name} is "
                f"{dtype_name(FP8)}. Restore the config.json that was saved with the weights."
            )
