"""A Megatron checkpoint: its index, and the table's tensors in it."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.dialects import Dialect
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, MTP, Row
from mcore_qwen3vl.converters.storage.boxes import Box, Extent, Shape, overlap
from mcore_qwen3vl.converters.storage.disk import load_pages
from mcore_qwen3vl.converters.storage.dtypes import DTYPES, dtype_name
from mcore_qwen3vl.errors import BadInput


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


NOT_THE_MODEL = re.compile(r"^(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler)")
"""Keys of a training checkpoint that are not the model's."""


class MegatronCheckpoint(ABC):
    """The tensors of one iteration of a checkpoint, under the table's keys.

    Attributes:
        folder: the iteration's folder.
        index: every key with its dtype, shape and chunks.
        data_files: the files that hold tensors.
        files: the files whose identity distinguishes this checkpoint from another.
        dialect: whose keys the files have; None for the table's own.
        checks: whether data is checked against the checksums in the files; see `check_data`.
    """

    dialect: Dialect | None = None
    checks = False

    def __init__(
        self, folder: Path, index: CheckpointIndex, data_files: list[Path], *others: Path
    ) -> None:
        self.folder, self.index = folder, index
        self.data_files, self.files = data_files, [*others, *data_files]
        self._chunks = {key: _chunks_by_corner(tensor) for key, tensor in index.tensors.items()}

    @abstractmethod
    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        """Return the values of one chunk, a view of the file."""

    @abstractmethod
    def _unfilled_error(self, key: str) -> BadInput:
        """Return the error for chunks that do not fill the tensor."""

    def check_data(self) -> None:
        """From now on, check what is read against the checksums in the files.

        Reading then raises BadInput if data has another one.
        """
        self.checks = True

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        embedding = self.index.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise BadInput(f"{self.folder} holds no {EMBEDDING}; it is not a whole GPT model.")
        return embedding.shape[0]

    @property
    def has_mtp(self) -> bool:
        """Whether there are MTP layers."""
        return any(key.startswith(MTP) for key in self.model_keys())

    def model_keys(self) -> set[str]:
        """Return the keys of the model's tensors, without optimizer state and the like."""
        return {key for key in self.index.tensors if not NOT_THE_MODEL.match(key)}

    def require(self, rows: Iterable[Row], unread: Container[str] = ()) -> None:
        """Check that the checkpoint's model tensors are exactly those that `rows` make.

        Those in `unread` may be there besides.

        Raises:
            BadInput: a tensor is missing, has another shape, or belongs to no row.
        """
        wanted = {row.key: row.global_shape for row in rows}
        stored = {key: self.index.tensors[key] for key in self.model_keys() if key not in unread}
        for key, shape in wanted.items():
            if key not in stored:
                raise BadInput(
                    f"{self.folder} lacks the tensor {key} {list(shape)}, which the Hugging Face "
                    "config calls for. Was it saved by another model, or is another config meant?"
                )
            if stored[key].shape != shape:
                raise wrong_shape_error(self.folder, key, stored[key].shape, shape)
            if stored[key].dtype not in DTYPES.values():
                raise BadInput(
                    f"{self.folder} says that the tensor {key} is {dtype_name(stored[key].dtype)}, "
                    "which no tensor of a model is. Copy the checkpoint again."
                )
        if extra := min((key for key in stored if key not in wanted), default=None):
            raise BadInput(
                f"{self.folder} holds the tensor {extra} {list(stored[extra].shape)}, which is no "
                "part of the model that the Hugging Face config describes. Dropping it in silence "
                "would lose data, so nothing was converted."
            )

    def arguments(self) -> Mapping[str, Any]:
        """Return Megatron's arguments of the run that saved this, by ``dest``; empty if unknown.

        Raises:
            BadInput: they are damaged, or beside objects that are not Megatron's.
        """
        return {}

    def dtype(self, key: str) -> torch.dtype:
        return self.index.tensors[key].dtype

    def tensor(self, key: str) -> Tensor:
        """Return the whole tensor under `key`."""
        shape = self.index.tensors[key].shape
        return self._read_chunks(key, (), (0,) * len(shape), shape)

    def read(self, key: str, start: Shape, size: Shape) -> Tensor:
        """Return a box of the tensor under `key`.

        Raises:
            BadInput: the chunks do not fill the box, or a chunk is damaged.
        """
        # Chunks are indexed by where they begin: this finds the chunks of one layer or expert.
        single = itertools.takewhile(lambda pair: pair[1] == 1, zip(start, size, strict=True))
        return self._read_chunks(key, tuple(place for place, _ in single)[:2], start, size)

    def read_box(self, row: Row, box: Box) -> Tensor:
        """Return a box of a row's piece: a view of the file if one chunk covers it, else a copy.

        Raises:
            BadInput: the chunks do not fill the box, or a chunk is damaged.
        """
        start = (*row.offset, *(part.start for part in box))
        size = (*(1 for _ in row.offset), *(part.stop - part.start for part in box))
        return self._read_chunks(row.key, row.offset, start, size).view(size[len(row.offset) :])

    def _read_chunks(self, key: str, corner: Shape, start: Shape, size: Shape) -> Tensor:
        """Return the box at `start`; `corner` is where its chunks are indexed."""
        out: Tensor | None = None
        filled = 0
        chunks = self._chunks[key]
        # Axes along which chunks are longer are not indexed: a shorter corner finds them.
        while corner and corner not in chunks:
            corner = corner[:-1]
        for chunk in chunks[corner]:
            inside = overlap(Extent(start, size), chunk)
            if inside is None:
                continue
            part = load_pages(self._read_chunk(key, chunk)[inside.stored])
            # One chunk covers the whole box, and no copy is needed.
            if part.numel() == prod(size):
                return part
            out = torch.empty(size, dtype=self.dtype(key)) if out is None else out
            out[inside.wanted] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise self._unfilled_error(key)
        return out


def wrong_shape_error(folder: Path, key: str, stored: Shape, wanted: Shape) -> BadInput:
    """Return the error for a tensor of another shape than the config gives it."""
    return BadInput(
        f"{folder}: tensor {key} has shape {list(stored)}, but the Hugging Face config makes it "
        f"{list(wanted)}. They are different models."
    )


def _chunks_by_corner(tensor: ChunkedTensor) -> dict[Shape, list[Chunk]]:
    """Index the chunks by corner: () for all, (layer,), and (layer, expert).

    Megatron stores each layer and each expert separately, so a chunk has size 1 on those axes. Its
    conversion tools do not. An axis on which any chunk is longer is not indexed, nor is the next.
    """
    table: dict[Shape, list[Chunk]] = defaultdict(list)
    depth = 0
    while depth < 2 and all(chunk.sizes[depth : depth + 1] == (1,) for chunk in tensor.chunks):
        depth += 1
    for chunk in tensor.chunks:
        for axes in range(depth + 1):
            table[chunk.offsets[:axes]].append(chunk)
    return table
