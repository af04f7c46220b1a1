"""Megatron-Core's ``torch_dist`` checkpoints: a lazy reader and a streaming writer.

Neither needs megatron-core, a model or a process group. A checkpoint directory holds
``latest_checkpointed_iteration.txt`` ("release" or a number) and one folder per iteration with
``.metadata``, ``metadata.json`` and ``.distcp`` files of tensors, each in its own archive.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mcore_qwen3vl.converters import dcp_metadata
from mcore_qwen3vl.converters.boxes import fill
from mcore_qwen3vl.converters.dcp_metadata import CheckpointIndex, Chunk, Place, StoredTensor
from mcore_qwen3vl.converters.direct import DirectFile
from mcore_qwen3vl.converters.mapped import bring_in
from mcore_qwen3vl.converters.mapping import Row
from mcore_qwen3vl.converters.stored import StoredModel
from mcore_qwen3vl.converters.torch_zip import NotATensor, read_tensor, write_tensor
from mcore_qwen3vl.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FOLDER = "hf"

ENDS = 2**16
"""Bytes at both ends of an archive that hold all of it but the tensor."""


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


class MegatronCheckpoint(StoredModel):
    """The tensors of one ``torch_dist`` checkpoint of any iteration, written at any layout.

    Raises:
        BadInput: not a ``torch_dist`` checkpoint, damaged metadata, or an absent data file.
    """

    def __init__(self, path: Path) -> None:
        folder = iteration_folder(path)
        _check_backend(folder)
        super().__init__(folder, dcp_metadata.read(folder))
        self._files: dict[str, memoryview] = {}
        for tensor in self.index.tensors.values():
            for chunk in tensor.chunks:
                self._view(chunk.place)
        for key in self.model_keys():
            if not fill(self.index.tensors[key].chunks, self.index.tensors[key].shape):
                raise self._unfilled(key)

    @property
    def data_files(self) -> list[Path]:
        return [self.folder / file for file in self._files]

    @property
    def files(self) -> list[Path]:
        return [self.folder / dcp_metadata.FILE, *self.data_files]

    def _unfilled(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder / dcp_metadata.FILE}: the chunks of {key} do not fill the tensor once "
            "each. A rank's file is missing from the checkpoint, or the metadata is damaged."
        )

    def _tensor(self, key: str, chunk: Chunk) -> Tensor:
        where = f"{self.folder / chunk.place.file}: the data of {key} at {list(chunk.offsets)}"
        try:
            view = self._view(chunk.place)
            for end in (view[:ENDS], view[-ENDS:]):
                bring_in(torch.frombuffer(end, dtype=torch.uint8))
            tensor = read_tensor(view)
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


@dataclass
class DistcpFile:
    """One ``.distcp`` file being written, tensor after tensor.

    Use as a context manager; `index` then says what the file holds. Nothing is kept in memory.
    """

    path: Path
    index: CheckpointIndex = field(default_factory=CheckpointIndex)
    _stream: DirectFile = field(init=False)

    def __enter__(self) -> DistcpFile:
        self._stream = DirectFile(self.path, create=True).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._stream.sync()

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
