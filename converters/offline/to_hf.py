"""Megatron-Core, or Hugging Face, to Hugging Face: the plan and its units, each part of one shard.

`lay_out` plans every conversion whose target is a Hugging Face checkpoint; they differ in where the
tensors come from (`Stream`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout, read_config_file
from mcore_qwen3vl.converters.formats import open_megatron
from mcore_qwen3vl.converters.hf import shards
from mcore_qwen3vl.converters.hf.companions import (
    companion_files,
    copy_companions,
    processor_notes,
    read_form,
)
from mcore_qwen3vl.converters.hf.config_file import Changes, dtype_to_state
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint, holder_of_mtp
from mcore_qwen3vl.converters.hf.shards import Shard
from mcore_qwen3vl.converters.identify import INDEX, identify
from mcore_qwen3vl.converters.mapping.forms import Form, Names, rename_entries
from mcore_qwen3vl.converters.mapping.table import (
    MTP,
    PUBLISHED_IN_FLOAT32,
    Row,
    SourceTensor,
    max_rows,
    split_experts,
    table,
)
from mcore_qwen3vl.converters.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.offline.engine import (
    ConversionPlan,
    PlannedTensor,
    Unit,
    Writing,
    file_identity,
    group_units,
    unit_bytes,
)
from mcore_qwen3vl.converters.offline.to_mcore import mtp_notes, open_huggingface, reading_notes
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.disk import DirectFile
from mcore_qwen3vl.converters.storage.dtypes import all_finite, cast, dtype_name, parse_dtype
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.errors import BadInput

LayoutChoice = Literal["source", "published", "v5"]


class HFOptions(Writing, total=False):
    """The options of a plan that writes a Hugging Face checkpoint, and of `engine.write`."""

    dtype: str
    max_shard_size: str
    expert_layout: LayoutChoice


Stream = Callable[[Row, int, torch.dtype], Iterator[Tensor]]
"""``stream(row, number, dtype)`` yields HF piece `number` of a row in chunks, in memory order."""


@dataclass(frozen=True)
class Fill:
    """One row's part of one HF tensor, and the shard that it is written to."""

    row: Row
    source: int
    name: str  # in the shard
    shard: Shard

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.tensors[self.name].dtype

    @property
    def nbytes(self) -> int:
        return shards.TensorSpec(self.dtype, self.row.sources[self.source].piece_shape).nbytes

    @property
    def offset(self) -> int:
        """Where the part begins in the shard."""
        source = self.row.sources[self.source]
        before = 0 if source.alone else source.first_value * self.dtype.itemsize
        return self.shard.offset(self.name) + before


@dataclass(frozen=True)
class ToHuggingFace:
    """A conversion to Hugging Face; see `engine.Conversion`."""

    stream: Stream
    shards: tuple[Shard, ...]
    hf_config: Path  # directory of the config and the companion files
    changes: Changes

    def prepare(self, tree: Path) -> None:
        for shard in self.shards:
            file = tree / shard.file
            if not file.exists() or file.stat().st_size != shard.size:
                shard.create(tree)

    def file(self, unit: Unit, tree: Path) -> Path:
        return tree / unit.work[0].shard.file

    def run_unit(self, unit: Unit, tree: Path, advance: Callable[[int, str], None]) -> Any:
        shard = unit.work[0].shard
        nonfinite: set[str] = set()

        with DirectFile(tree / shard.file, create=False) as out:
            for fill in unit.work:
                out.seek(fill.offset)
                for chunk in self.stream(fill.row, fill.source, fill.dtype):
                    if not all_finite(chunk):
                        nonfinite.add(fill.name)
                    out.write(as_bytes(chunk))
                advance(fill.nbytes, fill.name)
            out.sync()
        return {"size": shard.size, "nonfinite": sorted(nonfinite)}

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        copy_companions(self.hf_config, tree, self.changes)
        if len(self.shards) > 1:
            write_durably(tree / INDEX, shards.index_json(self.shards))


def stream_hf(
    checkpoint: MegatronCheckpoint,
    row: Row,
    source: int,
    dtype: torch.dtype,
    stated: Mapping[str, dict[str, Any]] = {},
) -> Iterator[Tensor]:
    """Return HF piece number `source` of `row` as `dtype`, in chunks, in memory order.

    Chunks are views of the checkpoint where possible.

    Raises:
        BadInput: the piece, before a cast, does not have the checksum in `stated`, which are a
            manifest's tensors.
    """
    named = row.sources[source]
    expected = manifest.stated_checksum(stated, named)
    digest = xxhash.xxh3_128()

    def fetch(box: Box) -> Tensor:
        return checkpoint.read_box(row, box)

    columns = tuple(slice(0, n) for n in row.shape[1:])
    rows = max_rows(row, dtype)
    for chunk in row.rearrangement.stream_back(source, fetch, columns, rows):
        if expected is not None:
            chunk = chunk.contiguous()  # once, for the checksum and for the writer
            digest.update(as_bytes(chunk))
        yield cast(chunk, dtype, row.key)
    if expected is not None and digest.hexdigest() != expected:
        raise BadInput(
            f"{checkpoint.folder}: {named.name} has other bytes than {manifest.FILE} "
            f"states{named.piece_words}, so it was damaged or changed after the conversion. "
            "`verify manifest` names all such tensors. Copy the checkpoint again; if the change is "
            "meant, delete the manifest."
        )


def _entries_with_checksums(
    checkpoint: MegatronCheckpoint, names: Names, layout: ExpertLayout | None
) -> dict[str, dict[str, Any]]:
    """Return the checksums in the checkpoint's manifest; none for iterations trained since.

    The checksums of experts hold for the layout that they were made from, and for no other.
    """
    file = manifest.find(checkpoint.folder)
    made = {} if file is None else manifest.read(file)
    if made.get("iteration") != checkpoint.folder.name:
        return {}
    tensors, same = rename_entries(made["tensors"], names), made["expert_layout"] == layout
    return {n: t for n, t in tensors.items() if same or isinstance(t[manifest.CHECKSUM], str)}


def plan_mcore_to_hf(
    src: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
    files: Mapping[str, bytes] = {},
) -> ConversionPlan:
    """Check a Megatron-Core checkpoint and plan its export; write nothing.

    Args:
        src: checkpoint directory, or the folder of one iteration.
        hf_config: directory with the HF config and tokenizer; default: ``src/hf``.
        dtype: "keep", "bf16", "fp16" or "fp32".
        max_shard_size: largest safetensors file, like "5GB".
        expert_layout: "source" keeps the layout of the experts and the config; "published" and
            "v5" convert both, for transformers 4.57 and 5.
        files: content of further files, by name, in place of those beside the config.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    place = identify(src)
    place.require_megatron()
    wanted = parse_dtype(dtype)
    folder = place.config() if hf_config is None else identify(hf_config).require_directory()
    architecture = Architecture.from_hf(folder)
    checkpoint = open_megatron(place, architecture)
    layout = chosen_layout(architecture, expert_layout)
    form = read_form(folder)
    stated = _entries_with_checksums(checkpoint, form.names, layout)
    form = form if expert_layout == "source" else form.for_transformers
    padded, mtp = checkpoint.vocab_size, checkpoint.has_mtp
    rows = table(
        architecture, expert_layout=layout, padded_vocab_size=padded, head=form.head, mtp=mtp
    )
    checkpoint.require(rows)
    further = None if mtp else holder_of_mtp(folder, architecture)
    notes = list(mtp_notes(architecture, mtp, remedy=_MTP_REMEDY))
    if further is not None:
        notes = [f"mtp.* is from {folder}."]
        further.require(table(architecture, head=further.form.head, mtp=True))
        all_rows = table(architecture, head=form.head, mtp=True)
        rows += [row for row in all_rows if row.key.startswith(MTP)]
        if expert_layout == "source":
            form = replace(form, split_experts=further.form.split_experts)
    sources = (source for row in rows for source in row.sources)
    # The manifest has no checksums of an expert's single matrices.
    checksums = (manifest.stated_checksum(stated, source) for source in sources)
    if form.split_experts or None in checksums:
        checkpoint.check_data()
    if isinstance(place.iteration, int) and wanted is None:
        notes += _rounded_notes(checkpoint, rows)
    padding = padded - architecture.vocab_size
    if padding:
        notes.append(f"The last {padding} rows of the vocabulary are padding and were left out.")

    def stream(row: Row, number: int, dtype: torch.dtype) -> Iterator[Tensor]:
        if further is not None and row.key.startswith(MTP):
            return stream_copy(further, row, number, dtype, swapped=False)
        return stream_hf(checkpoint, row, number, dtype, stated)

    def origin(row: Row, named: SourceTensor) -> tuple[str, torch.dtype]:
        if further is not None and row.key.startswith(MTP):
            return named.name, further.entries[named.name].dtype
        return row.key, checkpoint.dtype(row.key)

    return lay_out(
        "mcore-to-hf",
        place.path,
        rows,
        stream,
        origin=origin,
        hf_config=folder,
        files=[*checkpoint.files, *(further.files if further else ())],
        changes=Changes(None if expert_layout == "source" else expert_layout, wanted, files=files),
        max_shard_size=max_shard_size,
        layout=layout,
        form=form,
        notes=tuple(notes),
    )


def _rounded_notes(checkpoint: MegatronCheckpoint, rows: Iterable[Row]) -> list[str]:
    """Return a note if training in 16 bits may have rounded what is published in float32."""
    keys = {
        row.key
        for row in rows
        if any(s.name.endswith(PUBLISHED_IN_FLOAT32) for s in row.sources)
        and checkpoint.dtype(row.key).itemsize < torch.float32.itemsize
    }
    if not keys:
        return []
    return [
        f"{len(keys)} tensors, {' and '.join(PUBLISHED_IN_FLOAT32)}, are {dtype} here. If training "
        "began with float32 ones, which Qwen publishes, it has rounded them."
        for dtype in sorted({dtype_name(checkpoint.dtype(key)) for key in keys})
    ]


_MTP_REMEDY = (
    " --hf-config DIR copies it from a Hugging Face checkpoint that has it, such as the one that "
    "training began with."
)


def lay_out(
    direction: str,
    source: Path,
    rows: list[Row],
    stream: Stream,
    *,
    origin: Callable[[Row, SourceTensor], tuple[str, torch.dtype]],
    hf_config: Path,
    files: Iterable[Path],
    changes: Changes,
    max_shard_size: str,
    layout: ExpertLayout | None,
    form: Form,
    notes: tuple[str, ...],
) -> ConversionPlan:
    """Plan a conversion that writes a Hugging Face checkpoint.

    Args:
        rows: the rows whose HF tensors are written.
        origin: returns the name and dtype of the source of an HF tensor.
        hf_config: directory of the config and the other files that go beside the weights.
        files: other files that the conversion reads.
        changes: how the weights written differ from those that the config came with. Its layout
            is the form to convert the config to; `layout` is that of the experts written.

    Raises:
        BadInput: `max_shard_size` is not a size, or a companion file is a link that leads out of
            its directory.
    """
    names, dtype, labels = form.names, changes.dtype, changes.labels
    limit = shards.parse_size(max_shard_size)
    origins: dict[str, str] = {}
    tensors: dict[str, shards.TensorSpec] = {}
    rows = split_experts(rows, form.split_experts)
    for row in rows:
        for named in row.sources:
            name = names.stored_name(named.written_name)
            origins[name], kept = origin(row, named)
            spec = shards.TensorSpec(dtype or kept, named.written_shape)
            if tensors.setdefault(name, spec) != spec:
                raise BadInput(
                    f"{source}: the parts of {name} have different dtypes. Choose one with --dtype."
                )
    parts = tuple(shards.plan_shards(tensors, limit))
    companions = companion_files(hf_config)
    if dtype is None:  # training in another precision, for one, has changed it
        stated = dtype_to_state(read_config_file(hf_config), tensors.values())
        changes = replace(changes, dtype=stated)
    return ConversionPlan(
        direction=direction,
        source=str(source),
        planned=tuple(
            PlannedTensor((origins[name],), name, t.shape, dtype_name(t.dtype), t.nbytes)
            for name, t in tensors.items()
        ),
        units=tuple(_units(rows, names, parts)),
        companion_files=companions,
        expert_layout=layout,
        identity={
            "source": os.path.abspath(source),
            "files": file_identity([*files, *companions.values()]),
            "dtype": None if dtype is None else dtype_name(dtype),
            "shard": limit,
            "layout": [layout, changes.layout],
            "names": names.key,
            "untied": changes.untied,
            "vocab_size": changes.vocab_size,
            "labels": labels and [*labels.names, labels.problem_type],
            "card": {name: sha256(content).hexdigest() for name, content in changes.files.items()},
        },
        conversion=ToHuggingFace(stream, parts, hf_config, changes),
        files=len(parts),
        notes=(*form.notes, *notes, *processor_notes(hf_config)),
    )


def chosen_layout(architecture: Architecture, choice: LayoutChoice) -> ExpertLayout | None:
    """Return the layout of the experts to write; None for a dense model.

    Raises:
        BadInput: `choice` is not a `LayoutChoice`.
    """
    if choice not in get_args(LayoutChoice):
        raise BadInput(f"expert layout {choice!r} is not source, published or v5.")
    if not architecture.is_moe:
        return None
    return architecture.layout_of_experts(None if choice == "source" else choice)


def _units(rows: list[Row], names: Names, files: tuple[Shard, ...]) -> Iterator[Unit]:
    """Yield the work by shard, in the order of its tensors; no unit writes to two shards."""
    places: dict[str, list[tuple[Row, int]]] = {}
    for row in rows:
        for number, source in enumerate(row.sources):
            name = names.stored_name(source.written_name)
            places.setdefault(name, []).append((row, number))
    size = unit_bytes(sum(shard.data_bytes for shard in files))
    for shard in files:
        fills = (Fill(*place, name, shard) for name in shard.tensors for place in places[name])
        work = ((fill, fill.nbytes) for fill in fills)
        yield from group_units(work, size, partial("{}:{}".format, shard.file))


def plan_hf_to_hf(
    src: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
    vocab_size: int | None = None,
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan how to rewrite it; write nothing.

    It may get another layout of experts, another dtype, other shards or more rows.

    Args:
        dtype, max_shard_size, expert_layout: see `plan_mcore_to_hf`.
        vocab_size: number of rows that embedding and head are to have; each added row is the mean
            of the stored ones. Default: as many as there are.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    identify(src).require_huggingface()
    source, wanted = Path(src), parse_dtype(dtype)
    architecture = Architecture.from_hf(source)
    layout = chosen_layout(architecture, expert_layout)
    checkpoint = open_huggingface(source, architecture)
    form = checkpoint.form if expert_layout == "source" else checkpoint.form.for_transformers
    rows, notes = architecture.vocab_size, layout_notes(architecture, layout)
    if vocab_size is not None:
        if vocab_size < rows:
            raise BadInput(
                f"--resize-vocab {vocab_size} would take rows away: {source} has {rows:,}, and the "
                "tokens of the last ones would have none."
            )
        added = f"{vocab_size - rows:,} rows were added to the {rows:,} of the vocabulary"
        notes = (*notes, f"{added}; each is the mean of those.")

    return lay_out(
        "hf-to-hf",
        source,
        table(
            replace(architecture, vocab_size=vocab_size or rows),
            expert_layout=layout,
            head=form.head,
            mtp=checkpoint.has_mtp,
        ),
        partial(stream_copy, checkpoint, swapped=layout != architecture.expert_layout),
        origin=lambda _, named: (named.name, checkpoint.entries[named.name].dtype),
        hf_config=source,
        files=checkpoint.files,
        changes=Changes(
            None if expert_layout == "source" else expert_layout, wanted, vocab_size=vocab_size
        ),
        max_shard_size=max_shard_size,
        layout=layout,
        form=form,
        notes=(*reading_notes(checkpoint, wanted), *notes),
    )


def stream_copy(
    checkpoint: HuggingFaceCheckpoint, row: Row, number: int, dtype: torch.dtype, *, swapped: bool
) -> Iterator[Tensor]:
    """Yield HF piece `number` of `row` as `dtype`, read from the tensor of that name; see `Stream`.

    `swapped` says whether to swap the last two axes of fused experts. Rows missing from the
    checkpoint are the mean of its rows.
    """
    source = row.sources[number]
    if source.index is not None:
        expert = checkpoint.read_tensor(source.name, source.place(()), dtype)
        yield expert.T if swapped else expert
        return
    step, stored = max_rows(row, dtype), checkpoint.entries[source.name].shape[0]
    added, total = source.shape[0] - stored, torch.zeros(source.shape[1:], dtype=torch.float64)
    # Only embedding and head may have more rows than are stored, and neither is divided.
    end = stored if source.rows is None else source.piece_shape[0]
    for first in range(0, end, step):
        box = source.place((slice(first, min(first + step, end)),))
        if added:
            total += checkpoint.read_tensor(source.name, box, torch.float32).sum(
                0, dtype=torch.float64
            )
        yield checkpoint.read_tensor(source.name, box, dtype)
    for first in range(0, added, step):
        mean = cast((total / stored).float(), dtype, source.name)
        yield mean.repeat(min(step, added - first), 1)


def layout_notes(architecture: Architecture, layout: ExpertLayout | None) -> tuple[str, ...]:
    """Return a note if vLLM cannot load experts of this layout."""
    if layout != "v5" or architecture.layout_of_experts("published") == "v5":
        return ()
    return (
        "vLLM loads fused experts only in the published layout, and this checkpoint has the layout "
        "of transformers 5.",
    )
