"""Headers of safetensors files: what they declare, and which tensor a new file has at which byte.

The layout of new files is decided before any data is written, so that workers, or the ranks of a
running model, can fill the files in any order with the same result.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput

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
        name, file: names of the tensor, in the file, and of the file.
        dtype: default dtype of what `HuggingFaceCheckpoint.read_tensor` returns.
        stored: dtype in the file; differs from `dtype` if the tensor is quantised.
        scale: name of the tensor that holds a quantised tensor's factors, else None.
    """

    name: str
    file: str
    dtype: torch.dtype
    shape: Shape
    stored: torch.dtype
    scale: str | None = None


PATTERN = "model{suffix}.safetensors"
UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor that is to be written."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One safetensors file: a header, then the tensors in order, without gaps.

    Once it is created, several writers may fill it at once (`DirectFile`), at the `offset` of each
    tensor.
    """

    file: str
    tensors: Mapping[str, TensorSpec]

    @cached_property
    def header(self) -> bytes:
        """The header with its length, padded so that the data is aligned to 8 bytes."""
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, tensor in self.tensors.items():
            start = self._starts[name]
            described[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.nbytes],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def offset(self, name: str) -> int:
        """Return the byte at which the data of tensor `name` starts in the file."""
        return len(self.header) + self._starts[name]

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes

    def create(self, folder: Path) -> None:
        """Create the file at its full size with its header; the data is zero until filled."""
        with (folder / self.file).open("wb") as handle:
            handle.write(self.header)
            handle.truncate(self.size)
            os.fsync(handle.fileno())

    @cached_property
    def _starts(self) -> dict[str, int]:
        sizes = (tensor.nbytes for tensor in self.tensors.values())
        return dict(zip(self.tensors, accumulate(sizes, initial=0), strict=False))


def parse_size(text: str) -> int:
    """Return the bytes in "5GB" (decimal, as Hugging Face counts), "5GiB" (binary) or "5000000".

    Raises:
        BadInput: the text is not a size, or the size is zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", text.strip())
    size = int(float(match[1]) * UNITS.get(match[2] or "B", 0)) if match else 0
    if size <= 0:
        raise BadInput(f"{text!r} is not a size; write it like 5GB, 500MB or 2GiB.")
    return size


def plan_shards(tensors: Mapping[str, TensorSpec], max_shard_size: int) -> list[Shard]:
    """Assign tensors to files in order, as huggingface_hub does.

    No file has more than `max_shard_size` bytes of data, unless it holds a single larger tensor.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=PATTERN,
        max_shard_size=max_shard_size,
    )
    return [
        Shard(file, {name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    ]


def index_json(shards: Iterable[Shard]) -> bytes:
    """Return the content of ``model.safetensors.index.json``."""
    shards = list(shards)
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
