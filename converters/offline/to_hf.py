"""Megatron-Core to Hugging Face: the plan and its units. Each unit fills part of one shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout
from mcore_qwen3vl.converters.hf import processor_files, shards
from mcore_qwen3vl.converters.hf.checkpoint import INDEX
from mcore_qwen3vl.converters.hf.companions import companion_files, copy_companions
from mcore_qwen3vl.converters.hf.shards import Shard
from mcore_qwen3vl.converters.mapping.row import Row, max_rows
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.mcore.checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.mcore.formats import open_megatron
from mcore_qwen3vl.converters.mcore.paths import hf_folder
from mcore_qwen3vl.converters.offline.plan import (
    ConversionPlan,
    PlannedTensor,
    Unit,
    file_identity,
    group_units,
    unit_bytes,
)
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.dtypes import cast, dtype_name, parse_dtype
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.errors import BadInput

LayoutChoice = Literal["source", "published", "v5"]


@dataclass(frozen=True)
class Fill:
    """One row's part of one HF tensor and where in the shard it goes."""

    row: Row
    source: int
    dtype: torch.dtype
    offset: int

    @property
    def name(self) -> str:
        return self.row.sources[self.source].name

    @property
    def nbytes(self) -> int:
        return shards.TensorSpec(self.dtype, self.row.sources[self.source].piece_shape).nbytes


@dataclass(frozen=True)
class ToHuggingFace:
    """Does the units of one conversion; see `plan.Conversion`."""

    source: MegatronCheckpoint
    shards: tuple[Shard, ...]
    hf_config: Path  # directory of config and companion files
    layout: ExpertLayout | None  # to turn the experts into; None: as `hf_config` has them
    dtype: torch.dtype | None  # to write everything in; None: the source's own

    def prepare(self, tree: Path) -> None:
        for shard in self.shards:
            file = tree / shard.file
            if not file.exists() or file.stat().st_size != shard.size:
                shard.create(tree)

    def is_done(self, unit: Unit, tree: Path, result: Any) -> bool:
        file = tree / self._shard(unit).file
        return file.is_file() and file.stat().st_size == result["size"]

    def run(self, unit: Unit, tree: Path, moved: Callable[[int, str], None]) -> Any:
        shard = self._shard(unit)

        def data() -> Iterator[tuple[int, Iterator[Tensor]]]:
            for fill in unit.work:
                yield fill.offset, stream_hf(self.source, fill.row, fill.source, fill.dtype)
                moved(fill.nbytes, fill.name)

        shards.fill_shard(tree, shard, data())
        return {"size": shard.size}

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        copy_companions(self.hf_config, tree, layout=self.layout, dtype=self.dtype)
        if len(self.shards) > 1:
            write_durably(tree / INDEX, shards.index_json(self.shards))

    def _shard(self, unit: Unit) -> Shard:
        file = unit.name.split(":")[0]
        return next(shard for shard in self.shards if shard.file == file)


def stream_hf(
    checkpoint: MegatronCheckpoint, row: Row, source: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """HF piece number `source` of `row` as `dtype`, a chunk at a time, in the order of its memory.

    Chunks are views of the checkpoint where possible.
    """

    def fetch(box: Box) -> Tensor:
        return cast(checkpoint.read(row, box), dtype, row.key)

    columns = tuple(slice(0, n) for n in row.shape[1:])
    return row.rearrangement.stream_back(source, fetch, columns, max_rows(row, dtype))


def plan(
    source: Path,
    *,
    hf_config_dir: Path | None = None,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
) -> ConversionPlan:
    """Check an mcore checkpoint and lay out its export; see `convert.plan_mcore_to_hf`."""
    wanted = parse_dtype(dtype)
    limit = shards.parse_size(max_shard_size)
    if expert_layout not in get_args(LayoutChoice):
        raise BadInput(f"expert layout {expert_layout!r} is not source, published or v5.")
    folder = hf_config_dir or hf_folder(source)
    architecture = Architecture.from_hf(folder)
    checkpoint = open_megatron(source, architecture)
    layout = _layout(architecture, expert_layout)
    rows = table(architecture, expert_layout=layout, padded_vocab_size=checkpoint.vocab_size)
    checkpoint.require(rows)
    tensors = {
        source.name: shards.TensorSpec(wanted or checkpoint.dtype(row.key), source.shape)
        for row in rows
        for source in row.sources
    }
    files = tuple(shards.plan_shards(tensors, limit))
    companions = companion_files(folder)
    return ConversionPlan(
        direction="mcore-to-hf",
        source=str(source),
        planned=tuple(_planned(rows, tensors)),
        units=tuple(_units(rows, tensors, files)),
        companion_files=companions,
        expert_layout=layout,
        identity={
            "source": os.path.abspath(source),
            "files": file_identity([*checkpoint.files, *companions.values()]),
            "dtype": dtype,
            "shard": limit,
            "layout": expert_layout,
        },
        conversion=ToHuggingFace(
            checkpoint,
            files,
            folder,
            None if expert_layout == "source" else expert_layout,
            wanted,
        ),
        files=len(files),
        notes=_notes(checkpoint.vocab_size - architecture.vocab_size, folder),
    )


def _notes(padding: int, folder: Path) -> tuple[str, ...]:
    notes = []
    if padding:
        notes.append(f"The last {padding} rows of the vocabulary are padding and were left out.")
    if lacking := processor_files.sentence(folder):
        notes.append(f"Weights and config are converted. {lacking}")
    return tuple(notes)


def _layout(architecture: Architecture, choice: LayoutChoice) -> ExpertLayout | None:
    if not architecture.is_moe:
        return None
    return architecture.expert_layout if choice == "source" else choice


def _units(
    rows: list[Row], tensors: dict[str, shards.TensorSpec], files: tuple[Shard, ...]
) -> Iterator[Unit]:
    places: dict[str, list[tuple[Row, int]]] = {name: [] for name in tensors}
    for row in rows:
        for number, source in enumerate(row.sources):
            places[source.name].append((row, number))
    size = unit_bytes(sum(tensor.nbytes for tensor in tensors.values()))
    for shard in files:
        fills = (
            _fill(row, number, shard) for name in shard.tensors for row, number in places[name]
        )
        work = ((fill, fill.nbytes) for fill in fills)
        yield from group_units(work, size, lambda n, file=shard.file: f"{file}:{n}")


def _fill(row: Row, number: int, shard: Shard) -> Fill:
    source = row.sources[number]
    dtype = shard.tensors[source.name].dtype
    piece = shards.TensorSpec(dtype, source.piece_shape).nbytes
    return Fill(row, number, dtype, shard.offset(source.name) + (source.index or 0) * piece)


def _planned(rows: list[Row], tensors: dict[str, shards.TensorSpec]) -> Iterator[PlannedTensor]:
    for row in rows:
        for source in row.sources:
            if source.index:
                continue
            tensor = tensors[source.name]
            yield PlannedTensor(
                sources=(row.key,),
                target=source.name,
                shape=tensor.shape,
                dtype=dtype_name(tensor.dtype),
                nbytes=tensor.nbytes,
            )
