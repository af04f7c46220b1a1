"""Write ``torch_dist`` files as a stream, without megatron-core, a model or a process group."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mcore.index import CheckpointIndex, Chunk, ChunkedTensor, FileRange
from mcore_qwen3vl.converters.storage.archive import write_archive
from mcore_qwen3vl.converters.storage.direct import DirectFile
from mcore_qwen3vl.converters.storage.tensor_pickle import Described


class DistcpFile(DirectFile):
    """One ``.distcp`` file being written, tensor after tensor, without keeping data in memory.

    Attributes:
        index: what the file holds.
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
        tensor.chunks.append(Chunk(corner, sizes, self._place(start)))

    def write_object(self, key: str, content: bytes) -> None:
        start = self.tell()
        self.write(content)
        self.index.objects[key] = self._place(start)

    def _place(self, start: int) -> FileRange:
        return FileRange(self._name, start, self.tell() - start)
