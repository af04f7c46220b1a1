"""A checkpoint of another maker, read under the table's keys."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mcore_qwen3vl.config import VisionArchitecture
from mcore_qwen3vl.converters.mapping.dialects import LANGUAGE, Dialect
from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.table import vision_rows
from mcore_qwen3vl.converters.mcore.index import CheckpointIndex, Chunk, ChunkedTensor, FileRange
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import MegatronCheckpoint, wrong_shape
from mcore_qwen3vl.errors import BadInput


class TranslatedCheckpoint(MegatronCheckpoint):
    """The tensors of a checkpoint in a dialect.

    The language model's chunks are those of the stored tensors; each tensor of the vision tower is
    one chunk. `index` lists a tensor that the dialect does not know under its own key.

    Raises:
        BadInput: a tensor of the vision tower has another shape than the config gives it, or a
            tensor is there under two keys.
    """

    def __init__(
        self, stored: MegatronCheckpoint, dialect: Dialect, vision: VisionArchitecture
    ) -> None:
        self.dialect = dialect
        self._stored = stored
        self._vision: dict[str, tuple[Row, Row]] = {}
        tensors, index = dict(stored.index.tensors), CheckpointIndex(objects=stored.index.objects)
        translated = set()
        for row in vision_rows(vision):
            theirs = dialect.vision_row(row, vision)
            if (entry := tensors.get(theirs.key)) is None:
                continue
            if entry.shape != theirs.global_shape:
                raise wrong_shape(stored.folder, theirs.key, entry.shape, theirs.global_shape)
            corner = (0,) * len(row.shape)
            whole = Chunk(corner, row.shape, FileRange(theirs.key, 0, 0))
            index.tensors[row.key] = ChunkedTensor(entry.dtype, row.shape, [whole])
            self._vision[row.key] = row, theirs
            translated.add(theirs.key)
        for key, entry in tensors.items():
            if key in translated:
                continue
            if (name := key.removeprefix(LANGUAGE)) in index.tensors:
                raise BadInput(
                    f"{stored.folder} holds the tensor {name} under two keys: files of two "
                    "checkpoints are mixed."
                )
            index.tensors[name] = entry
        super().__init__(stored.folder, index)

    @property
    def data_files(self) -> list[Path]:
        return self._stored.data_files

    @property
    def files(self) -> list[Path]:
        return self._stored.files

    def _tensor(self, key: str, chunk: Chunk) -> Tensor:
        if key not in self._vision:
            own = LANGUAGE + key
            return self._stored._tensor(own if own in self._stored.index.tensors else key, chunk)
        row, theirs = self._vision[key]
        whole = self._stored.read(theirs, tuple(slice(0, n) for n in theirs.shape))
        return row.to_mcore(*theirs.to_hf(whole))

    def _unfilled(self, key: str) -> BadInput:
        return self._stored._unfilled(key)
