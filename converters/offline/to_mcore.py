"""Hugging Face to Megatron-Core: the plan and its units. Each unit is one ``.distcp`` file.

`plan_hf_to_mcore` leaves a format that loads under one layout only to that format's own `plan`.
"""

from __future__ import annotations

import io
import json
import os
import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.formats import format_named
from mcore_qwen3vl.converters.hf import quantized
from mcore_qwen3vl.converters.hf.companions import (
    companion_files,
    copy_companions,
    processor_notes,
    write_form,
)
from mcore_qwen3vl.converters.hf.config_file import Changes
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import (
    CHECKPOINT_CONFIG,
    DEFAULT_FORMAT,
    HF_FOLDER,
    RELEASE,
    TRACKER,
    folder_name,
    identify,
)
from mcore_qwen3vl.converters.mapping.dialects import Dialect, dialect_named
from mcore_qwen3vl.converters.mapping.table import Row, extra_state_keys, max_rows, table
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
)
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
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.dtypes import all_finite, dtype_name, parse_dtype
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.converters.torch_dist import DistcpFile, dumps_metadata
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

OBJECTS = "__0_objects.distcp"


class McoreOptions(Writing, total=False):
    """The options of `plan_hf_to_mcore` and of `engine.write`."""

    dtype: str
    make_vocab_size_divisible_by: int
    tp: int
    format: str
    layout: Layout | None
    spec: str | None
    dialect: str | None


@dataclass(frozen=True)
class ToMcore:
    """A conversion to ``torch_dist``; see `engine.Conversion`."""

    source: HuggingFaceCheckpoint
    architecture: Architecture
    tensors: dict[str, ChunkedTensor]  # by mcore key, without chunks
    dtype: torch.dtype | None  # dtype of all tensors; None: each keeps its own
    facts: dict[str, Any]  # other choices that the manifest states
    dialect: Dialect | None = None  # of the written keys; None: the table's own
    centred: frozenset[str] = frozenset()  # written keys of weights w that are stored as w - 1

    @property
    def tracker(self) -> str | int:
        return RELEASE if self.dialect is None else self.dialect.tracker

    def iteration_folder(self, tree: Path) -> Path:
        """Return the iteration's folder in `tree`."""
        return tree / folder_name(self.tracker)

    def prepare(self, tree: Path) -> None:
        self.iteration_folder(tree).mkdir(exist_ok=True)

    def file(self, unit: Unit, tree: Path) -> Path:
        return self.iteration_folder(tree) / unit.name

    def run_unit(self, unit: Unit, tree: Path, advance: Callable[[int, str], None]) -> Any:
        file = self.file(unit, tree)
        readers = self.readers(unit)
        with DistcpFile(file) as out:
            for reader in readers:
                out.write_row(reader.row, reader.dtype, reader.chunks())
                advance(reader.row.numel * reader.dtype.itemsize, reader.row.key)
            out.sync()
        chunks = [
            [key, chunk.offsets, chunk.sizes, chunk.data.offset, chunk.data.length]
            for key, tensor in out.index.tensors.items()
            for chunk in tensor.chunks
        ]
        return {"size": file.stat().st_size, "chunks": chunks, **unit_result(readers)}

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        folder = self.iteration_folder(tree)
        index = CheckpointIndex({key: replace(t, chunks=[]) for key, t in self.tensors.items()})
        for file, result in results.items():
            for key, offsets, sizes, start, length in result["chunks"]:
                chunk = Chunk(tuple(offsets), tuple(sizes), FileRange(file, start, length))
                index.tensors[key].chunks.append(chunk)
        with DistcpFile(folder / OBJECTS) as out:
            mtp = self.source.has_mtp
            for key, content in _pickled_objects(self.architecture, self.dialect, mtp=mtp):
                out.write_object(key, content)
            out.sync()
        index.objects = out.index.objects
        write_durably(folder / METADATA, dumps_metadata(index))
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_durably(folder / CHECKPOINT_CONFIG, json.dumps(backend).encode())
        self.write_files_beside(tree, results)

    def write_files_beside(self, tree: Path, results: dict[str, Any]) -> None:
        """Write the files beside the weights in any mcore format; the tracker comes last."""
        copy_companions(self.source.path, tree / HF_FOLDER, Changes(dtype=self.dtype))
        write_form(tree / HF_FOLDER, self.source.form)
        checksums = (entry for result in results.values() for entry in result.get("checksums", ()))
        content = manifest.dumps(self.source, self.facts, self.dtype, checksums)
        write_durably(tree / manifest.FILE, content)
        write_durably(tree / TRACKER, str(self.tracker).encode())

    def readers(self, unit: Unit) -> list[RowReader]:
        """Return a reader for each row of `unit`."""
        return [
            RowReader(
                self.source, row, self.tensors[row.key].dtype, centred=row.key in self.centred
            )
            for row in unit.work
        ]


class RowReader:
    """Reads what makes one row's mcore tensor, and sums up the HF pieces as they are read.

    Once `chunks` is exhausted, `checksums` and `nonfinite` describe the pieces.

    Attributes:
        centred: whether a weight w is written as w - 1.
        nonfinite: names of the HF tensors that hold a NaN or infinite value as `dtype`.
    """

    def __init__(
        self, source: HuggingFaceCheckpoint, row: Row, dtype: torch.dtype, *, centred: bool = False
    ) -> None:
        self._source, self.row, self.dtype, self.centred = source, row, dtype, centred
        self._rows_read = [0 for _ in row.sources]
        self._sums = [xxhash.xxh3_128() for _ in row.sources]
        self._before_cast: defaultdict[int, Any] = defaultdict(xxhash.xxh3_128)
        self.nonfinite: set[str] = set()

    def chunks(self) -> Iterator[Tensor]:
        """Yield the row's piece in order, in chunks that are views of the source where possible."""
        row, how = self.row, self.row.rearrangement
        if not how.in_order:  # a checksum needs the rows in order
            boxes = (tuple(slice(0, n) for n in s.piece_shape) for s in row.sources)
            yield row.to_mcore(*(self._read_piece(n, box) for n, box in enumerate(boxes)))
            return
        columns = tuple(slice(0, n) for n in row.shape[1:])
        for chunk in how.stream(self._read_piece, columns, max_rows(row, self.dtype)):
            yield chunk - 1 if self.centred else chunk

    def checksums(self) -> list[manifest.Checksum]:
        """Return the checksum of each HF piece, after checking that it was read to its end."""
        checksums: list[manifest.Checksum] = []
        for number, source in enumerate(self.row.sources):
            if self._rows_read[number] != source.piece_shape[0]:
                raise AssertionError(f"{source.name} was not read to its end")
            before = self._before_cast[number].hexdigest() if number in self._before_cast else None
            checksums.append((source.name, source.piece, self._sums[number].hexdigest(), before))
        return checksums

    def _read_piece(self, number: int, box: Box) -> Tensor:
        """Read a box of HF piece `number` and add it to the piece's checksum.

        Boxes are whole rows in order. Vocabulary padding reads the first row again.
        """
        source, (rows, *columns) = self.row.sources[number], box
        place = source.place(box)
        part = self._source.read_tensor(source.name, place, self.dtype)
        if rows.start < self._rows_read[number]:
            return part
        is_row_range = columns == [slice(0, n) for n in source.piece_shape[1:]]
        if not is_row_range or rows.start != self._rows_read[number]:
            raise AssertionError(f"{source.name}: {box} comes out of order")
        self._rows_read[number] = rows.stop
        self._sums[number].update(as_bytes(part))
        if not all_finite(part):
            self.nonfinite.add(source.name)
        if self._source.entries[source.name].stored != self.dtype:
            self._before_cast[number].update(as_bytes(self._source.read_stored(source.name, place)))
        return part


def unit_result(readers: Sequence[RowReader]) -> dict[str, Any]:
    """Return a finished unit's checksums and non-finite tensors, in the form of the journal."""
    return {
        "checksums": [checksum for reader in readers for checksum in reader.checksums()],
        "nonfinite": sorted({name for reader in readers for name in reader.nonfinite}),
    }


def plan_hf_to_mcore(
    src: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    format: str = DEFAULT_FORMAT,
    layout: Layout | None = None,
    spec: str | None = None,
    dialect: str | None = None,
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan its conversion; write nothing.

    Args:
        dtype: "keep", "bf16", "fp16" or "fp32".
        make_vocab_size_divisible_by, tp: the vocabulary is padded as Megatron pads it for these
            flags.
        format: the value of Megatron's ``--ckpt-format``: "torch_dist" loads under any layout,
            "torch" (legacy) under one only.
        layout: the parallel sizes, for a format that is written for one layout. Its TP replaces
            `tp` in the padding; CP, DP and SP do not matter. Default: one rank.
        spec: the layer spec for the parameter names, for a format that is written for one layout:
            "te" (the default) or "torch".
        dialect: the project whose keys are written, "megatron-bridge" or "ms-swift"; or "hybrid",
            for those of Megatron-Core's ``HybridModel``. Default: this project's own.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    source = identify(src)
    source.require_huggingface()
    plan_per_layout = format_named(format).plan
    wanted = None if dialect is None else dialect_named(dialect)
    common: Any = {"dtype": dtype, "make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    if plan_per_layout is not None:
        if wanted is not None:
            raise BadInput(f"--dialect {dialect} is written in the {DEFAULT_FORMAT} format only.")
        return plan_per_layout(source.path, layout or Layout(), spec or "te", **common)
    if layout is not None or spec is not None:
        raise BadInput(
            f"{format} loads under any layout and layer spec: leave layout and spec out, or choose "
            "a format that is written for one layout."
        )
    return plan(source.path, **common, tp=tp, dialect=wanted)


def plan(
    source: Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    dialect: Dialect | None = None,
) -> ConversionPlan:
    """Check an HF checkpoint and plan its conversion to ``torch_dist``; see `plan_hf_to_mcore`."""
    if make_vocab_size_divisible_by < 1 or tp < 1:
        raise BadInput("--make-vocab-size-divisible-by and --tp must be at least 1.")
    wanted = parse_dtype(dtype)
    architecture = Architecture.from_hf(source)
    multiple = make_vocab_size_divisible_by * tp  # as Megatron pads
    padded = -(-architecture.vocab_size // multiple) * multiple
    checkpoint = open_huggingface(source, architecture)
    head, mtp = checkpoint.form.head.in_megatron, checkpoint.has_mtp
    centred: frozenset[str] = frozenset()
    rows = table(architecture, padded_vocab_size=padded, head=head, mtp=mtp)
    if dialect is not None:
        dialect.require_architecture(architecture)
        checkpoint.form.require_language_model(source)
        centred = frozenset(dialect.language + key for key in dialect.centred_keys(rows))
        rows = [*dialect.stored_rows(rows, architecture)]
        _require_exact(checkpoint, [r for r in rows if r.key in centred], wanted, dialect.maker)
    tensors = _target_tensors(checkpoint, rows, wanted)
    companions = companion_files(source)
    work = [(row, row.numel * tensors[row.key].dtype.itemsize) for row in rows]
    size = unit_bytes(sum(nbytes for _, nbytes in work))
    units = tuple(group_units(work, size, lambda n: f"__0_{n}.distcp"))
    facts = {
        "iteration": folder_name(RELEASE if dialect is None else dialect.tracker),
        "expert_layout": architecture.expert_layout,
        "vocabulary": {"rows": architecture.vocab_size, "padded_to": padded},
        "quantization": checkpoint.quantization,  # the source's; the target is not quantised
    }
    return ConversionPlan(
        direction="hf-to-mcore",
        source=str(source),
        planned=tuple(_dry_run_lines(rows, tensors)),
        units=units,
        companion_files=companions,
        expert_layout=architecture.expert_layout,
        identity={
            "source": os.path.abspath(source),
            "files": file_identity([*checkpoint.files, *companions.values()]),
            "dtype": dtype,
            "vocabulary": padded,
            "dialect": dialect and dialect.key,
        },
        conversion=ToMcore(checkpoint, architecture, tensors, wanted, facts, dialect, centred),
        files=len(units),
        notes=(
            *checkpoint.form.notes,
            *reading_notes(checkpoint, wanted),
            *mtp_notes(architecture, checkpoint.has_mtp),
            *processor_notes(checkpoint.path),
        ),
    )


def open_huggingface(source: Path, architecture: Architecture) -> HuggingFaceCheckpoint:
    """Open a checkpoint and check that it holds the model that its config describes.

    Raises:
        BadInput: the checkpoint holds other tensors, or is damaged.
    """
    checkpoint = HuggingFaceCheckpoint(source)
    checkpoint.require(table(architecture, head=checkpoint.form.head, mtp=checkpoint.has_mtp))
    return checkpoint


def reading_notes(checkpoint: HuggingFaceCheckpoint, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return what reading changes: tensors left out, and FP8 written dequantised as `dtype`."""
    notes = []
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in checkpoint.left_out)
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        notes.append(f"No part of a Qwen3-VL, and left out as by transformers: {listed}.")
    if count := sum(entry.stored == quantized.FP8 for entry in checkpoint.entries.values()):
        written = dtype_name(dtype or quantized.DEQUANTIZED)
        notes.append(f"{count} tensors are FP8 and are written dequantised, as {written}.")
    return tuple(notes)


def mtp_notes(architecture: Architecture, has_mtp: bool, *, remedy: str = "") -> tuple[str, ...]:
    """Return a note if a checkpoint lacks the MTP layer."""
    if has_mtp or not architecture.mtp_num_hidden_layers:
        return ()
    return (
        "The checkpoint lacks the MTP layer (mtp.*), which its config "
        f"names, and so does the result: nothing decodes speculatively with it.{remedy}",
    )


def _target_tensors(
    checkpoint: HuggingFaceCheckpoint, rows: list[Row], wanted: torch.dtype | None
) -> dict[str, ChunkedTensor]:
    """Return the dtype and shape of each mcore tensor; raise BadInput if it would have several."""
    tensors: dict[str, ChunkedTensor] = {}
    first: dict[str, str] = {}
    for row in rows:
        for source in row.sources:
            dtype = wanted or checkpoint.entries[source.name].dtype
            target = tensors.setdefault(row.key, ChunkedTensor(dtype, row.global_shape))
            other = first.setdefault(row.key, source.name)
            if target.dtype != dtype:
                raise BadInput(
                    f"tensors {other} ({dtype_name(target.dtype)}) and {source.name} "
                    f"({dtype_name(dtype)}) both belong to {row.key}, which has one dtype. "
                    "Choose it with --dtype bf16, fp16 or fp32."
                )
    return tensors


def _require_exact(
    checkpoint: HuggingFaceCheckpoint, centred: list[Row], wanted: torch.dtype | None, maker: str
) -> None:
    """Raise BadInput if a weight w would not come back from w - 1."""
    for name in (source.name for row in centred for source in row.sources):
        weight = checkpoint.read_tensor(name, (), wanted or checkpoint.entries[name].dtype)
        back = (weight - 1).float() + 1
        if changed := int(((back != weight) & ~weight.isnan()).sum()):
            raise BadInput(
                f"{checkpoint.path}: {changed} of {weight.numel()} weights of {name} would be "
                f"rounded, since {maker} stores this norm less one. Nothing was converted. "
                "Convert with that project's own tool, which rounds them too."
            )


def _dry_run_lines(rows: list[Row], tensors: dict[str, ChunkedTensor]) -> Iterator[PlannedTensor]:
    """Yield a line for each tensor of a layer; its experts share one."""
    for row in rows:
        first = row.sources[0]
        if first.index:
            continue  # the first expert's line stands for all
        experts = 1 if first.index is None else first.shape[0]
        dtype = tensors[row.key].dtype
        layer = f"[{row.offset[0]}]" if row.global_shape[:-2] and row.offset else ""
        shape = row.shape if experts == 1 else (experts, *row.shape)
        yield PlannedTensor(
            sources=tuple(source.name for source in row.sources),
            target=row.key + layer,
            shape=shape,
            dtype=dtype_name(dtype),
            nbytes=experts * row.numel * dtype.itemsize,
        )


def _pickled_objects(
    architecture: Architecture, dialect: Dialect | None, *, mtp: bool
) -> Iterator[tuple[str, bytes]]:
    """Yield a checkpoint's pickled objects: Megatron's common state and empty ``_extra_state``."""
    common: dict[str, Any] = {"iteration": 0, "checkpoint_version": 3.0, "content_metadata": {}}
    keys: Iterable[str] = extra_state_keys(architecture, mtp=mtp)
    if dialect is not None:
        common["args"] = Namespace(**dialect.arguments(architecture))
        keys = dialect.extra_state_keys(architecture, mtp=mtp)
    yield "common_state/shard_0_1", _pickle([common])
    empty = _pickle([None])
    for key in keys:
        yield key, empty


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
