"""The index of a Megatron checkpoint: tensors made of chunks, pickled objects, and their places."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mcore_qwen3vl.converters.storage.boxes import Extent, Shape


@dataclass(frozen=True)
class FileRange:
    """Where one chunk or object is stored: a file's name, first byte and number of bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk(Extent):
    """One stored box of a tensor."""

    data: FileRange


@dataclass
class ChunkedTensor:
    """One tensor of the checkpoint: its dtype, its global shape and the chunks that fill it."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """The tensors and pickled objects of a checkpoint, by key."""

    tensors: dict[str, ChunkedTensor] = field(default_factory=dict)
    objects: dict[str, FileRange] = field(default_factory=dict)
