"""Megatron-Core to Hugging Face: the plan and its units. Each unit fills part of one shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout, read_config_file
from mcore_qwen3vl.converters.hf import config_file, shards
from mcore_qwen3vl.converters.hf.checkpoint import INDEX
from mcore_qwen3vl.converters.hf.companions import copy_sidecars, sidecar_files
from mcore_qwen3vl.converters.hf.shards import Shard
from mcore_qwen3vl.converters.legacy.checkpoint import open_megatron
from mcore_qwen3vl.converters.mapping.row import Row, max_rows
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.offline.plan import (
    Plan,
    Step,
    Unit,
    file_identity,
    group_units,
    unit_bytes,
)
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.direct import DirectFile
from mcore_qwen3vl.converters.storage.dtypes import cast, dtype_name, parse_dtype
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.converters.torch_dist.paths import hf_folder
from mcore_qwen3vl.converters.torch_dist.stored import StoredModel
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
        return shards.Tensor(self.dtype, self.row.sources[self.source].piece_shape).nbytes


@dataclass(frozen=True)
class ToHuggingFace:
    """Does the units of one conversion; see `plan.Conversion`."""

    source: StoredModel
    shards: tuple[Shard, ...]
    sidecars: dict[str, Path]
    config: bytes | None  # rewritten config.json; None: the source's own

    def prepare(self, tree: Path) -> None:
        for shard in self.shards:
            file = tree / shard.file
            if not file.exists() or file.stat().st_size != shard.size:
                shard.create(tree)

    def is_done(self, unit: Unit, tree: Path, result: Any) -> bool:
        file, size = unit.name.split(":")[0], result["size"]
        return (tree / file).is_file() and (tree / file).stat().st_size == size

    def run(self, unit: Unit, tree: Path, moved: Callable[[int, str], None]) -> Any:
        file = tree / unit.name.split(":")[0]
        with DirectFile(file, create=False) as out:
            for fill in unit.work:
                out.seek(fill.offset)
                for chunk in stream_hf(self.source, fill.row, fill.source, fill.dtype):
                    out.write(as_bytes(chunk))
                moved(fill.nbytes, fill.name)
            out.sync()
        return {"size": file.stat().st_size}

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        copy_sidecars(self.sidecars, tree, self.config)
        if len(self.shards) > 1:
            write_durably(tree / INDEX, shards.index_json(self.shards))


def stream_hf(
    checkpoint: StoredModel, row: Row, source: int, dtype: torch.dtype
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
) -> Plan:
    """Check an mcore checkpoint and lay out its export; see `convert.plan_mcore_to_hf`."""
    wanted = parse_dtype(dtype)
    limit = shards.parse_size(max_shard_size)
    if expert_layout not in get_args(LayoutChoice):
        raise BadInput(f"expert layout {expert_layout!r} is not source, published or v5.")
    folder = hf_config_dir or hf_folder(source)
    config = read_config_file(folder)
    architecture = Architecture.from_hf(config)
    checkpoint = open_megatron(source, architecture)
    layout = _layout(architecture, expert_layout)
    rows = table(architecture, expert_layout=layout, padded_vocab_size=checkpoint.vocab_size)
    checkpoint.require(rows)
    tensors = {
        source.name: shards.Tensor(wanted or checkpoint.dtype(row.key), source.shape)
        for row in rows
        for source in row.sources
    }
    files = tuple(shards.plan_shards(tensors, limit))
    sidecars = sidecar_files(folder)
    return Plan(
        direction="mcore-to-hf",
        source=str(source),
        steps=tuple(_steps(rows, tensors)),
        units=tuple(_units(rows, tensors, files)),
        sidecars=sidecars,
        expert_layout=layout,
        identity={
            "source": os.path.abspath(source),
            "files": file_identity([*checkpoint.files, *sidecars.values()]),
            "dtype": dtype,
            "shard": limit,
            "layout": expert_layout,
        },
        conversion=ToHuggingFace(
            checkpoint,
            files,
            sidecars,
            config_file.for_weights(
                config, layout=None if expert_layout == "source" else expert_layout, dtype=wanted
            ),
        ),
        files=len(files),
        notes=_notes(checkpoint.vocab_size - architecture.vocab_size),
    )


def _notes(padding: int) -> tuple[str, ...]:
    if not padding:
        return ()
    return (f"The last {padding} rows of the vocabulary are padding and were left out.",)


def _layout(architecture: Architecture, choice: LayoutChoice) -> ExpertLayout | None:
    if not architecture.is_moe:
        return None
    return architecture.expert_layout if choice == "source" else choice


def _units(
    rows: list[Row], tensors: dict[str, shards.Tensor], files: tuple[Shard, ...]
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
    piece = shards.Tensor(dtype, source.piece_shape).nbytes
    return Fill(row, number, dtype, shard.offset(source.name) + (source.index or 0) * piece)


def _steps(rows: list[Row], tensors: dict[str, shards.Tensor]) -> Iterator[Step]:
    for row in rows:
        for source in row.sources:
            if source.index:
                continue
            tensor = tensors[source.name]
            yield Step(
                sources=(row.key,),
                target=source.name,
                shape=tensor.shape,
                dtype=dtype_name(tensor.dtype),
                nbytes=tensor.nbytes,
            )
