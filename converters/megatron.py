"""Megatron-Core's ``torch_dist`` checkpoints: a lazy reader and a streaming writer.

Neither needs megatron-core, a model or a process group. A checkpoint directory holds
``latest_checkpointed_iteration.txt`` ("release" or a number) and one folder per iteration with
``.metadata``, ``metadata.json`` and ``.distcp`` files of tensors, each in its own archive.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from mcore_qwen3vl.converters import dcp_metadata
from mcore_qwen3vl.converters.boxes import Extent, fill, overlap
from mcore_qwen3vl.converters.dcp_metadata import CheckpointIndex, Chunk, Place, StoredTensor
from mcore_qwen3vl.converters.mapping import EMBEDDING, Row, Shape, mcore_shapes
from mcore_qwen3vl.converters.torch_zip import NotATensor, read_tensor, write_tensor
from mcore_qwen3vl.converters.transforms import Box
from mcore_qwen3vl.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FOLDER = "hf"

NOT_THE_MODEL = re.compile(r"^(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler)")
"""Keys that a training checkpoint holds beside the model's."""


def is_megatron(path: Path) -> bool:
    """Whether `path` looks like a Megatron checkpoint or one iteration of it."""
    known = (path / TRACKER).is_file() or (path / dcp_metadata.FILE).is_file()
    return known or any(path.glob("mp_rank_*"))


def iteration_folder(path: Path) -> Path:
    """The folder of the newest iteration, or `path` itself if it is such a folder.

    Raises:
        BadInput: the tracker file is unreadable or names an iteration that is not there.
    """
    if not (path / TRACKER).is_file():
        return path
    try:
        newest = (path / TRACKER).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / TRACKER} cannot be read: {error}.") from None
    if newest != RELEASE and not newest.isdigit():
        raise BadInput(f"{path / TRACKER} says {newest[:40]!r}; a number or 'release' is expected.")
    folder = path / (RELEASE if newest == RELEASE else f"iter_{int(newest):07d}")
    if not folder.is_dir():
        raise BadInput(f"{path / TRACKER} names {folder.name}, but {folder} does not exist.")
    return folder


class MegatronCheckpoint:
    """The tensors of one ``torch_dist`` checkpoint of any iteration, written at any layout.

    Attributes:
        folder: the iteration's folder.
        index: every key with its dtype, shape and chunks.

    Raises:
        BadInput: not a ``torch_dist`` checkpoint, damaged metadata, or an absent data file.
    """

    def __init__(self, path: Path) -> None:
        self.folder = iteration_folder(path)
        _check_backend(self.folder)
        self.index = dcp_metadata.read(self.folder)
        self._files: dict[str, memoryview] = {}
        self._chunks = {key: _by_corner(t) for key, t in self.index.tensors.items()}
        for tensor in self.index.tensors.values():
            for chunk in tensor.chunks:
                self._view(chunk.place)
        for key in self.model_keys():
            if not fill(self.index.tensors[key].chunks, self.index.tensors[key].shape):
                raise self._unfilled(key)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        embedding = self.index.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise BadInput(f"{self.folder} holds no {EMBEDDING}; it is not a whole GPT model.")
        return embedding.shape[0]

    @property
    def data_files(self) -> list[Path]:
        """The files that hold tensors."""
        return [self.folder / file for file in self._files]

    @property
    def files(self) -> list[Path]:
        """The files that tell this checkpoint from another."""
        return [self.folder / dcp_metadata.FILE, *self.data_files]

    def model_keys(self) -> set[str]:
        """Keys of the model's own tensors, optimizer state and the like left out."""
        return {key for key in self.index.tensors if not NOT_THE_MODEL.match(key)}

    def require(self, rows: Iterable[Row]) -> None:
        """Check that the checkpoint's model tensors are exactly those that `rows` make.

        Raises:
            BadInput: a tensor is missing, has another shape, or belongs to no row.
        """
        wanted = mcore_shapes(list(rows))
        found = {key: self.index.tensors[key] for key in self.model_keys()}
        for key, shape in wanted.items():
            if key not in found:
                raise BadInput(
                    f"{self.folder} lacks the tensor {key} {list(shape)}, which the Hugging Face "
                    "config calls for. Was it saved by another model, or is another config meant?"
                )
            if found[key].shape != shape:
                raise BadInput(
                    f"{self.folder}: tensor {key} has shape {list(found[key].shape)}, but the "
                    f"Hugging Face config makes it {list(shape)}. They are different models."
                )
        if extra := min((key for key in found if key not in wanted), default=None):
            raise BadInput(
                f"{self.folder} holds the tensor {extra} {list(found[extra].shape)}, which is no "
                "part of the model that the Hugging Face config describes. Dropping it in silence "
                "would lose data, so nothing was converted."
            )

    def dtype(self, key: str) -> torch.dtype:
        return self.index.tensors[key].dtype

    def tensor(self, key: str) -> Tensor:
        """The whole tensor under `key`."""
        shape = self.index.tensors[key].shape
        return self._read(key, (), (0,) * len(shape), shape)

    def read(self, row: Row, box: Box) -> Tensor:
        """A box of one row's piece: a view of the file where one chunk covers it, else a copy.

        Raises:
            BadInput: the chunks do not fill the box, or a chunk is damaged.
        """
        start = (*row.offset, *(part.start for part in box))
        size = (*(1 for _ in row.offset), *(part.stop - part.start for part in box))
        return self._read(row.key, row.offset, start, size).view(size[len(row.offset) :])

    def _read(self, key: str, corner: Shape, start: Shape, size: Shape) -> Tensor:
        out: Tensor | None = None
        filled = 0
        for chunk in self._chunks[key].get(corner, ()):
            inside = overlap(Extent(start, size), chunk)
            if inside is None:
                continue
            part = self._tensor(key, chunk)[inside.stored]
            if part.numel() == prod(size):
                return part
            out = torch.empty(size, dtype=self.dtype(key)) if out is None else out
            out[inside.wanted] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise self._unfilled(key)
        return out

    def _unfilled(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder / dcp_metadata.FILE}: the chunks of {key} do not fill the tensor once "
            "each. A rank's file is missing from the checkpoint, or the metadata is damaged."
        )

    def _tensor(self, key: str, chunk: Chunk) -> Tensor:
        where = f"{self.folder / chunk.place.file}: the data of {key} at {list(chunk.offsets)}"
        try:
            tensor = read_tensor(self._view(chunk.place))
        except NotATensor as error:
            raise BadInput(f"{where} is damaged or of another kind: {error}.") from None
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != self.dtype(key):
            raise BadInput(
                f"{where} is {list(tensor.shape)} {tensor.dtype}, but .metadata says "
                f"{list(chunk.sizes)} {self.dtype(key)}. The files belong to different checkpoints."
            )
        return tensor

    def _view(self, place: Place) -> memoryview:
        if place.file not in self._files:
            self._files[place.file] = _map(self.folder / place.file)
        whole = self._files[place.file]
        if place.offset + place.length > len(whole):
            raise BadInput(
                f"{self.folder / place.file} has {len(whole)} bytes, but .metadata places data up "
                f"to byte {place.offset + place.length}. The file is cut short: copy it again."
            )
        return whole[place.offset : place.offset + place.length]


def _check_backend(folder: Path) -> None:
    file = folder / "metadata.json"
    try:
        content = json.loads(file.read_bytes())
        backend, version = content.get("sharded_backend"), content.get("sharded_backend_version", 1)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a Megatron-Core torch_dist checkpoint: it has no metadata.json."
        ) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{file} cannot be read ({error!r:.200}). Copy the checkpoint again."
        ) from None
    if backend != "torch_dist" or version != 1:
        raise BadInput(
            f"{file} says the checkpoint's format is {backend!r:.40}, version {version!r:.40}; "
            "torch_dist is read, version 1. Load it in Megatron and save it again with "
            "--ckpt-format torch_dist."
        )


def _map(file: Path) -> memoryview:
    try:
        with file.open("rb") as handle:
            return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read ({error}). The checkpoint is incomplete.") from None


def _by_corner(tensor: StoredTensor) -> dict[Shape, list[Chunk]]:
    """Chunks by what they may overlap: all of them, one layer, one expert of one layer.

    Megatron stores each layer and each expert apart, so a chunk is one slice thick there.
    """
    table: dict[Shape, list[Chunk]] = defaultdict(list)
    for chunk in tensor.chunks:
        table[()].append(chunk)
        for axis in range(min(2, len(chunk.sizes))):
            if chunk.sizes[axis] != 1:
                break
            table[chunk.offsets[: axis + 1]].append(chunk)
    return table


@dataclass
class DistcpFile:
    """One ``.distcp`` file being written, tensor after tensor.

    Use as a context manager; `index` then says what the file holds. Nothing is kept in memory.
    """

    path: Path
    index: CheckpointIndex = field(default_factory=CheckpointIndex)
    _stream: BinaryIO = field(init=False)

    def __enter__(self) -> DistcpFile:
        self._stream = self.path.open("wb", buffering=2**20)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def write_row(self, row: Row, dtype: torch.dtype, chunks: Iterable[Tensor]) -> None:
        """Append one row's piece; `chunks` are its memory in order."""
        start = self._stream.tell()
        sizes = (*(1 for _ in row.offset), *row.shape)
        write_tensor(self._stream, dtype, sizes, chunks)
        tensor = self.index.tensors.setdefault(row.key, StoredTensor(dtype, row.global_shape))
        corner = (*row.offset, *(0 for _ in row.shape))
        tensor.chunks.append(Chunk(corner, sizes, self._place(start)))

    def write_object(self, key: str, content: bytes) -> None:
        start = self._stream.tell()
        self._stream.write(content)
        self.index.objects[key] = self._place(start)

    def _place(self, start: int) -> Place:
        return Place(self.path.name, start, self._stream.tell() - start)
