"""Write ``torch_dist`` files as a stream, without megatron-core, a model or a process group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mcore.index import CheckpointIndex, Chunk, ChunkedTensor, FileRange
from mcore_qwen3vl.converters.storage.archive import write_tensor
from mcore_qwen3vl.converters.storage.direct import DirectFile


@dataclass
class DistcpFile:
    """One ``.distcp`` file being written, tensor after tensor, without keeping data in memory.

    Use it as a context manager; `index` records what the file holds.
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
        """Append one row's piece; `chunks` hold its values in order."""
        start = self._stream.tell()
        sizes = (*(1 for _ in row.offset), *row.shape)
        write_tensor(self._stream, dtype, sizes, chunks)
        tensor = self.index.tensors.setdefault(row.key, ChunkedTensor(dtype, row.global_shape))
        corner = (*row.offset, *(0 for _ in row.shape))
        tensor.chunks.append(Chunk(corner, sizes, self._place(start)))

    def write_object(self, key: str, content: bytes) -> None:
        start = self._stream.tell()
        self._stream.write(content)
        self.index.objects[key] = self._place(start)

    def _place(self, start: int) -> FileRange:
        return FileRange(self.path.name, start, self._stream.tell() - start)
