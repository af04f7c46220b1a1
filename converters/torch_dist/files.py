"""Read and write Megatron-Core's ``torch_dist`` checkpoints, a tensor at a time.

Neither needs megatron-core, a model or a process group. A checkpoint directory holds
``latest_checkpointed_iteration.txt`` ("release" or a number) and one folder per iteration with
``.metadata``, ``metadata.json`` and ``.distcp`` files of tensors, each in its own archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.table import Row
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
)
from mcore_qwen3vl.converters.storage.archive import (
    BadArchive,
    Described,
    Sums,
    arguments_in,
    load,
    read_tensor,
    write_archive,
)
from mcore_qwen3vl.converters.storage.boxes import fill
from mcore_qwen3vl.converters.storage.disk import DirectFile, bring_in, map_file
from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json

ENDS = 2**16
"""Bytes at each end of an archive; the two ends hold everything but the tensor's data."""


class TorchDistCheckpoint(MegatronCheckpoint):
    """The tensors of one iteration of a ``torch_dist`` checkpoint, written under any layout.

    Raises:
        BadInput: the folder is not a ``torch_dist`` checkpoint, the metadata is damaged, a data
            file is absent or cut short, or the chunks do not fill a tensor exactly once.
    """

    def __init__(self, folder: Path) -> None:
        _check_backend(folder)
        index = metadata.read(folder)
        chunks = [chunk for tensor in index.tensors.values() for chunk in tensor.chunks]
        files = [folder / name for name in dict.fromkeys(chunk.data.file for chunk in chunks)]
        super().__init__(folder, index, files, folder / metadata.FILE)
        self._mapped: dict[str, memoryview] = {}
        self._sums = Sums()
        self._tensors: dict[Chunk, Tensor] = {}
        for chunk in chunks:
            self._view(chunk.data)
        for key in self.model_keys():
            if not fill(self.index.tensors[key].chunks, self.index.tensors[key].shape):
                raise self._unfilled_error(key)

    def arguments(self) -> Mapping[str, Any]:
        if (file := self.folder / "common.pt").is_file():  # before Megatron 0.19
            return arguments_in(load(file))
        for key, place in self.index.objects.items():
            if key.startswith("common_state/"):
                part = slice(place.offset, place.offset + place.length)
                return arguments_in(load(self.folder / place.file, part))
        return {}

    def _unfilled_error(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder / metadata.FILE}: the chunks of {key} do not fill the tensor once "
            "each. A rank's file is missing from the checkpoint, or the metadata is damaged."
        )

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        # A QKV weight is read in a hundred boxes: parsing its archive once halves the time of it.
        if (known := self._tensors.get(chunk)) is not None:
            return known
        where = f"{self.folder / chunk.data.file}: the data of {key} at {list(chunk.offsets)}"
        try:
            view = self._view(chunk.data)
            for end in (view[:ENDS], view[-ENDS:]):
                bring_in(torch.frombuffer(end, dtype=torch.uint8))
            tensor = read_tensor(view, self._sums)
            if self.checks:
                self._sums.check(tensor)
        except BadArchive as error:
            raise BadInput(f"{where} is damaged or of another kind: {error}.") from None
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != self.dtype(key):
            raise BadInput(
                f"{where} is {list(tensor.shape)} {tensor.dtype}, but .metadata says "
                f"{list(chunk.sizes)} {self.dtype(key)}. The files belong to different checkpoints."
            )
        self._tensors[chunk] = tensor
        return tensor

    def _view(self, place: FileRange) -> memoryview:
        file = self.folder / place.file
        try:
            mapped = self._mapped.get(place.file) or map_file(file)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{file} cannot be read ({error}). The checkpoint is incomplete."
            ) from None
        self._mapped[place.file] = mapped
        if place.offset + place.length > len(mapped):
            raise BadInput(
                f"{file} has {len(mapped)} bytes, but .metadata places data up "
                f"to byte {place.offset + place.length}. The file is cut short: copy it again."
            )
        return mapped[place.offset : place.offset + place.length]


def _check_backend(folder: Path) -> None:
    file = folder / "metadata.json"
    try:
        content = parse_json(file.read_bytes())
        backend, version = content.get("sharded_backend"), content.get("sharded_backend_version", 1)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a Megatron-Core torch_dist checkpoint: it has no metadata.json."
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(
            f"{file} cannot be read ({error!r:.200}). Copy the checkpoint again."
        ) from None
    if backend != "torch_dist" or version != 1:
        raise BadInput(
            f"{file} says the checkpoint's format is {backend!r:.40}, version {version!r:.40}; "
            "only torch_dist, version 1, can be read. Load it in Megatron and save it again "
            "with --ckpt-format torch_dist."
        )


class DistcpFile(DirectFile):
    """One ``.distcp`` file being written, tensor after tensor, without keeping data in memory.

    `index` says what it holds.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=True)
        self.index = CheckpointIndex()
        self._name = path.name

    def write_row(self, row: Row, dtype: torch.dtype, chunks: Iterable[Tensor]) -> None:
        """Append one row's piece; `chunks` hold its values in order."""
        start = self.tell()
        sizes = (*(1 for _ in row.offset), *row.shape)
        nbytes = row.numel * dtype.itemsize
        write_archive(self, Described(dtype, sizes), [(nbytes, chunks)])
        tensor = self.index.tensors.setdefault(row.key, ChunkedTensor(dtype, row.global_shape))
        corner = (*row.offset, *(0 for _ in row.shape))
        tensor.chunks.append(Chunk(corner, sizes, self._range_since(start)))

    def write_object(self, key: str, content: bytes) -> None:
        start = self.tell()
        self.write(content)
        self.index.objects[key] = self._range_since(start)

    def _range_since(self, start: int) -> FileRange:
        return FileRange(self._name, start, self.tell() - start)
