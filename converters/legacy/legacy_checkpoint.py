"""Megatron's legacy checkpoints (``--ckpt-format torch``), read as the table's tensors.

A legacy checkpoint has one file for each model-parallel rank, with that rank's parameters under the
names of its layer spec. The files are mapped and their tensors are assembled into whole tensors;
the data of the optimizer and random states in the files is never read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.legacy.files import RankFile, open_ranks, saved_arguments
from mcore_qwen3vl.converters.legacy.layout import (
    FILE,
    OUTPUT,
    Spec,
    Stage,
    local_name,
    pipeline_stages,
    rank_boxes,
    require_equal_parts,
    share_out,
)
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, Row, table
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
)
from mcore_qwen3vl.converters.storage.archive import BadArchive, Sums
from mcore_qwen3vl.converters.storage.boxes import Shape, fill
from mcore_qwen3vl.errors import BadInput


class LegacyCheckpoint(MegatronCheckpoint):
    """The tensors of one legacy checkpoint, assembled from the ranks' files.

    `index` lists a parameter that the table does not know as ``FOLDER/NAME``, with the name of its
    rank's folder.

    Raises:
        BadInput: it is no folder of a legacy checkpoint; a file is damaged, or holds more than
            tensors and Megatron's own state; or a rank's file is absent.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        require_equal_parts(architecture)
        self._sums = Sums()
        self._ranks = open_ranks(folder, self._sums)
        self.layout = self._ranks[0].layout
        self._experts = max(architecture.num_experts // self.layout.ep, 1)  # per layer on one rank
        self._by_tp = {(f.rank.pp, f.rank.tp): f for f in self._ranks}
        etp = self.layout.etp
        self._by_etp = {(f.rank.pp, f.rank.ep, f.rank.tp % etp): f for f in self._ranks}
        self._values: dict[tuple[str, Shape], Tensor] = {}  # of each chunk, by key and first corner
        self.index = CheckpointIndex()
        self._find_parts(architecture)
        super().__init__(folder, self.index, [file.path for file in self._ranks])

    def require(self, rows: Iterable[Row], unread: Container[str] = ()) -> None:
        super().require(rows, unread)
        for key, tensor in self.index.tensors.items():
            if not fill(tensor.chunks, tensor.shape):
                raise self._unfilled_error(key)

    def arguments(self) -> Mapping[str, Any]:
        return vars(saved_arguments(self.folder))

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        tensor = self._values[key, chunk.offsets]
        if self.checks:
            try:
                self._sums.check(tensor)
            except BadArchive as error:
                raise BadInput(
                    f"{self.folder}: a rank's part of {key} is damaged: {error}. Copy the "
                    "checkpoint again."
                ) from None
        return tensor

    def _unfilled_error(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder}: the ranks' parts of {key} do not make up the whole tensor. A layer or "
            "an expert is missing from a rank's file."
        )

    def _find_parts(self, a: Architecture) -> None:
        """Fill the index with the parts of each row's tensor in the ranks' files."""
        pp, vpp = range(self.layout.pp), range(self.layout.vpp)
        pipeline = pipeline_stages([[self._by_tp[rank, 0].layers(vp) for rank in pp] for vp in vpp])
        self._layers = sum(len(stage.layers) for stage in pipeline)
        vocabulary = self._by_tp[0, 0].models[0].get(EMBEDDING)
        padded = len(vocabulary) * self.layout.tp if isinstance(vocabulary, Tensor) else 0
        rows = table(a, expert_layout="published", padded_vocab_size=max(padded, a.vocab_size))
        shares = share_out(rows, pipeline, tied=a.tie_word_embeddings)
        for stage, stage_rows in zip(pipeline, shares, strict=True):
            known = set()
            for row in stage_rows:
                for name in self._names(row, stage):
                    known.add(name)
                    if not (a.tie_word_embeddings and name == OUTPUT):  # the embedding's copy
                        self._add(row, stage, name)
            self._add_unknown(stage, known)

    def _names(self, row: Row, stage: Stage) -> set[str]:
        """Return the names of `row` in the files of `stage`: at most one if no file is damaged."""
        states = [self._file(row, stage, n).models[stage.vp] for n in range(self._count(row))]
        names = {local_name(row, stage, self._experts, spec) for spec in get_args(Spec)}
        return {name for name in names if any(name in state for state in states)}

    def _count(self, row: Row) -> int:
        """Return how many tensor-parallel parts `row` is stored in; 1 if it is not divided."""
        if row.tp_axis is None:
            return 1
        return self.layout.tp if row.expert is None else self.layout.etp

    def _file(self, row: Row, stage: Stage, part: int) -> RankFile:
        """Return one file with part number `part` of `row`; other files may have copies of it."""
        if row.expert is None:
            return self._by_tp[stage.pp, part]
        return self._by_etp[stage.pp, row.expert // self._experts, part]

    def _add(self, row: Row, stage: Stage, name: str) -> None:
        """Add the ranks' parts of `row` to the index, each cut into boxes of the whole."""
        count = self._count(row)
        for part in range(count):
            file = self._file(row, stage, part)
            local = file.tensor(stage.vp, name)
            size = [n * count if axis == row.tp_axis else n for axis, n in enumerate(local.shape)]
            stored = self._entry(row, local, tuple(size), f"{file.path}: {name}")
            places = rank_boxes(row, tuple(size), part, count)
            pieces, axis = len(places), row.tp_axis or 0
            cuts = [local] if pieces == 1 else local.tensor_split(pieces, axis)
            for box, values in zip(places, cuts, strict=True):
                corner = (*row.offset, *(side.start for side in box))
                values = values[(None,) * len(row.offset)]
                stored.chunks.append(Chunk(corner, tuple(values.shape), FileRange(FILE, 0, 0)))
                self._values[row.key, corner] = values

    def _entry(self, row: Row, local: Tensor, shape: Shape, where: str) -> ChunkedTensor:
        """Return the index entry of the row's tensor, with the shape in the files, not the config.

        Raise BadInput if ranks or layers disagree on its dtype or shape.
        """
        stacked = list(row.global_shape[: len(row.offset)])
        if len(stacked) > (row.expert is not None):
            stacked[0] = self._layers
        global_shape = (*stacked, *shape)
        entry = self.index.tensors.setdefault(row.key, ChunkedTensor(local.dtype, global_shape))
        if (entry.dtype, entry.shape) != (local.dtype, global_shape):
            raise BadInput(
                f"{where} has {row.key} {list(global_shape)} {local.dtype}, but other ranks or "
                f"layers have {list(entry.shape)} {entry.dtype}. The files do not belong together."
            )
        return entry

    def _add_unknown(self, stage: Stage, known: set[str]) -> None:
        for file in self._ranks:
            if file.rank.pp != stage.pp:
                continue
            for name in file.models[stage.vp]:
                if name in known or name.endswith("_extra_state"):
                    continue
                tensor = file.tensor(stage.vp, name)
                entry = ChunkedTensor(tensor.dtype, tuple(tensor.shape))
                self.index.tensors[f"{file.path.parent.name}/{name}"] = entry
