"""Lay out safetensors files: which tensor goes to which file at which byte.

The layout is decided before a byte is written, so that workers, or the ranks of a running model,
can fill the files in any order and the result is the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from mcore_qwen3vl.converters.hf.checkpoint import DTYPES, SINGLE
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput

NAMES = {dtype: name for name, dtype in DTYPES.items()}
UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor before it is written."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One safetensors file: a header, then the tensors in order, without gaps."""

    file: str
    tensors: Mapping[str, Tensor]

    @cached_property
    def header(self) -> bytes:
        """The header with its length, padded so that the data is aligned to 8 bytes."""
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, (start, stop) in self._spans.items():
            tensor = self.tensors[name]
            described[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, stop],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def offset(self, name: str) -> int:
        """Where the data of tensor `name` starts in the file."""
        return len(self.header) + self._spans[name][0]

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes

    def create(self, folder: Path) -> None:
        """Make the file at its full size with its header; the data is zero until it is filled."""
        with (folder / self.file).open("wb") as handle:
            handle.write(self.header)
            handle.truncate(self.size)
            os.fsync(handle.fileno())

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        spans, start = {}, 0
        for name, tensor in self.tensors.items():
            spans[name] = (start, start + tensor.nbytes)
            start += tensor.nbytes
        return spans


def parse_size(text: str) -> int:
    """Bytes in "5GB" (decimal, as Hugging Face counts), "5GiB" (binary) or "5000000".

    Raises:
        BadInput: not a size, or zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", text.strip())
    size = int(float(match[1]) * UNITS.get(match[2] or "B", 0)) if match else 0
    if size <= 0:
        raise BadInput(f"{text!r} is not a size; write it like 5GB, 500MB or 2GiB.")
    return size


def plan_shards(tensors: Mapping[str, Tensor], max_shard_size: int) -> list[Shard]:
    """Fill files with tensors in order, none larger than `max_shard_size` unless one tensor is."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def index_json(shards: Iterable[Shard]) -> bytes:
    """The content of ``model.safetensors.index.json``."""
    shards = list(shards)
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
