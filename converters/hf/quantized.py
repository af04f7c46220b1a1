"""Quantised Hugging Face checkpoints: one kind is read, every other is refused by name.

The kind that is read is FP8 as Qwen publishes it: ``quant_method: fp8`` in ``config.json``, and
weights as float8_e4m3fn. Each weight has a tensor ``<name>_scale_inv`` with one factor for each
block of 128 x 128 values (the last blocks may be smaller); fused experts have a grid of factors for
each expert. A value is the stored number times its block's factor, multiplied in float32.

Quantised MoE checkpoints, and those of Qwen3.5 that transformers saves, hold
``experts.{e}.gate_proj.weight`` (I, H), ``up_proj`` (I, H) and ``down_proj`` (H, I) in place of the
fused ``experts.gate_up_proj`` and ``experts.down_proj``. The reader of Hugging Face checkpoints
assembles the fused tensors on reading, a box at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_qwen3vl.config import declared_expert_layout
from mcore_qwen3vl.converters.hf.shards import FLOATS, FP8, TensorHeader
from mcore_qwen3vl.converters.mapping.table import EXPERT_MATRICES
from mcore_qwen3vl.converters.storage.boxes import Selection, with_explicit_bounds
from mcore_qwen3vl.converters.storage.dtypes import cast, dtype_name
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import Fields, Unused

BLOCK = 128
SUFFIX = "_scale_inv"
DEQUANTIZED = torch.bfloat16
"""Default dtype of dequantised tensors."""

UNDERSTOOD = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "float",
    "expert_dtype": "fp8",
}
"""Accepted values in ``quantization_config``; the first two fields are required."""

SKIPPED = ("modules_to_not_convert", "ignored_layers")
"""Fields of ``quantization_config`` that list unquantised modules."""

FIELDS = Fields(
    "quantization_config of config.json",
    used=(*UNDERSTOOD, *SKIPPED),
    without_effect={"dequantize": (False, True)},
)

LEFTOVER = re.compile(
    r"(weight|input|output|activation|[qkv])_(scale|zero_point)(_\d)?$|_scale_inv$|_scales?$"
    r"|\.(scales|biases|qweight|qzeros|g_idx|SCB|weight_packed|weight_shape|weight_format|absmax)$"
    r"|\.(quant_state|quant_map|nested_|weight\.)"
)
"""Names of the tensors that quantisers store beside weights."""

_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()


def declared_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a ``config.json``, or None if there is none.

    Raises:
        BadInput: the quantisation is of a kind that is not understood; the message names it.
    """
    declarations = _declarations(config)
    if not declarations:
        return None
    quantization = declarations[0]
    if not isinstance(quantization, dict) or any(other != quantization for other in declarations):
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


def _declarations(config: Mapping[str, Any]) -> list[Any]:
    """Return every value that declares a quantisation, at the top level or in a section."""
    sections = (config, config.get("text_config"), config.get("vision_config"))
    keys = ("quantization_config", "compression_config")
    return [
        section[key]
        for section in sections
        if isinstance(section, dict)
        for key in keys
        if section.get(key)
    ]


def unused_of_quantization(config: Mapping[str, Any]) -> list[Unused]:
    """Return the fields of the ``quantization_config`` of a ``config.json`` that nothing uses."""
    sections = filter(lambda section: isinstance(section, dict), _declarations(config))
    return [unused for section in sections for unused in FIELDS.unused(section)]


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` without its declarations of quantisation."""
    keys = ("quantization_config", "compression_config")
    return {
        name: without_quantization(value) if name in ("text_config", "vision_config") else value
        for name, value in config.items()
        if name not in keys
    }


def pair_factors(
    stored: Mapping[str, TensorHeader], quantization: Mapping[str, Any] | None
) -> tuple[dict[str, TensorHeader], dict[str, TensorHeader]]:
    """Match each FP8 tensor with the tensor of its factors.

    `quantization` is what `declared_quantization` returned.

    Returns:
        The headers of the model's tensors, with `scale` and the dtype to read set on those in FP8;
        and the headers of the factors.

    Raises:
        BadInput: an FP8 tensor has no factors or factors of the wrong shape or dtype, the config
            does not declare it as quantised, or a tensor belongs to another kind of quantisation.
    """
    tensors, scales = dict(stored), {}
    for name, entry in stored.items():
        if entry.stored == FP8:
            scale = f"{name}{SUFFIX}"
            _check_factors(name, entry, stored.get(scale), quantization)
            tensors[name] = replace(entry, dtype=DEQUANTIZED, scale=scale)
            scales[scale] = tensors.pop(scale)
    for name, entry in tensors.items():
        if entry.scale is None and LEFTOVER.search(name):
            raise BadInput(
                f"tensor {name} {list(entry.shape)} ({dtype_name(entry.stored)}) belongs to a "
                "quantised checkpoint of a kind that is not understood. Convert the model's "
                "original checkpoint."
            )
    return tensors, scales


def dequantize(
    stored: Tensor, factors: Tensor, rows: slice, columns: slice, dtype: torch.dtype, name: str
) -> Tensor:
    """Return the values of a box of one FP8 matrix or of a stack of FP8 matrices.

    Args:
        stored: the box, (..., rows, columns), float8_e4m3fn.
        factors: factors of the whole matrices, (..., all rows / 128, all columns / 128), rounded
            up.
        rows, columns: where the box lies in its matrix.

    Raises:
        BadInput: a factor is not finite, or a value does not fit `dtype`.
    """
    result = torch.empty(stored.shape, dtype=dtype)
    across = torch.arange(columns.start, columns.stop) // BLOCK
    stacks = ([t] if t.ndim == 2 else t for t in (stored, factors, result))
    for matrix, grid, out in zip(*stacks, strict=True):
        if not grid.isfinite().all():
            raise BadInput(f"tensor {name}{SUFFIX} holds a factor that is not finite.")
        for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            first = max(block * BLOCK - rows.start, 0)
            part = matrix[first : (block + 1) * BLOCK - rows.start]
            # A table look-up in numpy is several times faster than torch's conversion from FP8.
            values = torch.from_numpy(np.take(_VALUES, part.view(torch.uint8).numpy()))
            values *= grid[block].float()[across]
            out[first : first + len(part)] = cast(values, dtype, name)
    return result


def _check_factors(
    name: str,
    entry: TensorHeader,
    factors: TensorHeader | None,
    quantization: Mapping[str, Any] | None,
) -> None:
    """Raise BadInput unless an FP8 tensor is declared as such and has a factor for each block."""
    scale = f"{name}{SUFFIX}"
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
    if factors.shape != grid or factors.stored not in FLOATS.values():
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


NAME = re.compile(r"(.+\.mlp\.experts)\.(0|[1-9]\d{0,5})\.(?:gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class SplitExperts:
    """How one fused tensor is stored.

    Attributes:
        parts: for each expert, the names of its matrices, stacked by rows.
        height: rows of each matrix.
        swapped: whether the fused tensor has each expert transposed (the published layout).
    """

    parts: tuple[tuple[str, ...], ...]
    shape: tuple[int, int, int]
    height: int
    swapped: bool

    def take(self, box: Selection, get: Callable[[str, Selection], Tensor]) -> Tensor:
        """Return `box` of the fused tensor; ``get(name, box)`` reads a box of one matrix."""
        expert, rows, columns = with_explicit_bounds(box, self.shape)
        if self.swapped:
            rows, columns = columns, rows
        if isinstance(expert, int):
            return self._read_matrix(expert, rows, columns, get)
        experts = range(expert.start, expert.stop)
        return torch.stack([self._read_matrix(e, rows, columns, get) for e in experts])

    def _read_matrix(
        self, expert: int, rows: slice, columns: slice, get: Callable[[str, Selection], Tensor]
    ) -> Tensor:
        """Return a part of one expert's matrix; `rows` and `columns` are those of its parts."""
        pieces = []
        for number, name in enumerate(self.parts[expert]):
            above = number * self.height
            start, stop = max(rows.start - above, 0), min(rows.stop - above, self.height)
            if start < stop:
                pieces.append(get(name, (slice(start, stop), columns)))
        matrix = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return matrix.T if self.swapped else matrix


def fuse_experts(
    entries: Mapping[str, TensorHeader], config: dict[str, Any]
) -> tuple[dict[str, TensorHeader], dict[str, SplitExperts]]:
    """Return headers with fused tensors for experts stored one by one, and how those are stored.

    The ``config.json``, `config`, declares the layout of the fused tensors.

    Raises:
        BadInput: an expert is missing, or differs in shape or dtype from the others; experts are
            stored both one by one and fused; or the config contradicts itself.
    """
    experts_of: dict[str, set[int]] = {}
    fused: dict[str, TensorHeader] = {}
    for name, entry in entries.items():
        if (named := NAME.fullmatch(name)) is not None:
            experts_of.setdefault(named[1], set()).add(int(named[2]))
        else:
            fused[name] = entry
    split: dict[str, SplitExperts] = {}
    for prefix, experts in experts_of.items():
        if missing := set(range(len(experts))) - experts:
            raise BadInput(
                f"the checkpoint stores {prefix} one by one and has {len(experts)} of them, but "
                f"lacks number {min(missing)}. Fetch the complete checkpoint."
            )
        for target, kinds in EXPERT_MATRICES.items():
            name = f"{prefix}.{target}"
            if name in fused:
                raise BadInput(f"{prefix} are stored both one by one and fused, as {name}.")
            names = [[f"{prefix}.{e}.{kind}.weight" for kind in kinds] for e in range(len(experts))]
            first = _require_alike(names, entries)
            height, columns = first.shape
            rows = height * len(kinds)
            swapped = declared_expert_layout(config) == "published"
            shape = (len(experts), *((columns, rows) if swapped else (rows, columns)))
            split[name] = SplitExperts(tuple(map(tuple, names)), shape, height, swapped)
            # The factors of each part are applied when that part is read.
            fused[name] = replace(first, shape=shape, scale=None)
    return fused, split


def _require_alike(names: list[list[str]], entries: Mapping[str, TensorHeader]) -> TensorHeader:
    """Check that all tensors in `names` have the same shape and dtype; return the first header."""
    first: TensorHeader | None = None
    for name in (name for expert in names for name in expert):
        entry = entries.get(name)
        if entry is None:
            raise BadInput(
                f"the checkpoint stores its experts one by one, but {name} is missing. Fetch the "
                "complete checkpoint."
            )
        first = first or entry
        alike = (entry.shape, entry.stored) == (first.shape, first.stored)
        if not alike or len(entry.shape) != 2:
            raise BadInput(
                f"tensor {name} {list(entry.shape)} ({entry.stored}) is not like the same matrix "
                f"of other experts, {list(first.shape)} ({first.stored}). Fetch it again."
            )
    assert first is not None
    return first
