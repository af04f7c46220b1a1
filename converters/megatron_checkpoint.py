"""A Megatron checkpoint of any format and maker: its index, and the table's tensors in it.

Each format has its own module. Code that reads a checkpoint calls `open_megatron`, and names no
format itself.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.identify import DEFAULT_FORMAT, FORMATS, CheckpointPlace, identify
from mcore_qwen3vl.converters.mapping.dialects import (
    HYBRID,
    HYBRID_NORM,
    Dialect,
    dialect_of,
    keys_of_pairs,
)
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, LAYERS, MTP, Row, table, vision_rows
from mcore_qwen3vl.converters.storage.boxes import Box, Extent, Shape, overlap
from mcore_qwen3vl.converters.storage.disk import load_pages
from mcore_qwen3vl.converters.storage.dtypes import DTYPES, dtype_name
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class FileRange:
    """Where one chunk or object is stored: a file's name, first byte and number of bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk(Extent):
    """One stored box of a tensor."""

    data: FileRange


@dataclass
class ChunkedTensor:
    """One tensor of the checkpoint: its dtype, its global shape and the chunks that fill it."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """The tensors and pickled objects of a checkpoint, by key."""

    tensors: dict[str, ChunkedTensor] = field(default_factory=dict)
    objects: dict[str, FileRange] = field(default_factory=dict)


NOT_THE_MODEL = re.compile(r"^(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler)")
"""Keys of a training checkpoint that are not the model's."""


class MegatronCheckpoint(ABC):
    """The tensors of one iteration of a checkpoint, under the table's keys.

    Attributes:
        folder: the iteration's folder.
        index: every key with its dtype, shape and chunks.
        data_files: the files that hold tensors.
        files: the files whose identity distinguishes this checkpoint from another.
        dialect: whose keys the files have; None for the table's own.
        checks: whether data is checked against the checksums in the files; see `check_data`.
    """

    dialect: Dialect | None = None
    checks = False

    def __init__(
        self, folder: Path, index: CheckpointIndex, data_files: list[Path], *others: Path
    ) -> None:
        self.folder, self.index = folder, index
        self.data_files, self.files = data_files, [*others, *data_files]
        self._chunks = {key: _chunks_by_corner(tensor) for key, tensor in index.tensors.items()}

    @abstractmethod
    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        """Return the values of one chunk, a view of the file."""

    @abstractmethod
    def _unfilled_error(self, key: str) -> BadInput:
        """Return the error for chunks that do not fill the tensor."""

    def check_data(self) -> None:
        """From now on, check what is read against the checksums in the files.

        Reading then raises BadInput if data has another one.
        """
        self.checks = True

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        embedding = self.index.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise BadInput(f"{self.folder} holds no {EMBEDDING}; it is not a whole GPT model.")
        return embedding.shape[0]

    @property
    def has_mtp(self) -> bool:
        """Whether there are MTP layers."""
        return any(key.startswith(MTP) for key in self.model_keys())

    def model_keys(self) -> set[str]:
        """Return the keys of the model's tensors, without optimizer state and the like."""
        return {key for key in self.index.tensors if not NOT_THE_MODEL.match(key)}

    def require(self, rows: Iterable[Row], unread: Container[str] = ()) -> None:
        """Check that the checkpoint's model tensors are exactly those that `rows` make.

        Those in `unread` may be there besides.

        Raises:
            BadInput: a tensor is missing, has another shape, or belongs to no row.
        """
        wanted = {row.key: row.global_shape for row in rows}
        stored = {key: self.index.tensors[key] for key in self.model_keys() if key not in unread}
        for key, shape in wanted.items():
            if key not in stored:
                raise BadInput(
                    f"{self.folder} lacks the tensor {key} {list(shape)}, which the Hugging Face "
                    "config calls for. Was it saved by another model, or is another config meant?"
                )
            if stored[key].shape != shape:
                raise wrong_shape_error(self.folder, key, stored[key].shape, shape)
            if stored[key].dtype not in DTYPES.values():
                raise BadInput(
                    f"{self.folder} says that the tensor {key} is {dtype_name(stored[key].dtype)}, "
                    "which no tensor of a model is. Copy the checkpoint again."
                )
        if extra := min((key for key in stored if key not in wanted), default=None):
            raise BadInput(
                f"{self.folder} holds the tensor {extra} {list(stored[extra].shape)}, which is no "
                "part of the model that the Hugging Face config describes. Dropping it in silence "
                "would lose data, so nothing was converted."
            )

    def arguments(self) -> Mapping[str, Any]:
        """Return Megatron's arguments of the run that saved this, by ``dest``; empty if unknown.

        Raises:
            BadInput: they are damaged, or beside objects that are not Megatron's.
        """
        return {}

    def dtype(self, key: str) -> torch.dtype:
        return self.index.tensors[key].dtype

    def tensor(self, key: str) -> Tensor:
        """Return the whole tensor under `key`."""
        shape = self.index.tensors[key].shape
        return self._read_chunks(key, (), (0,) * len(shape), shape)

    def read(self, key: str, start: Shape, size: Shape) -> Tensor:
        """Return a box of the tensor under `key`.

        Raises:
            BadInput: the chunks do not fill the box, or a chunk is damaged.
        """
        # Chunks are indexed by where they begin, which tells those of a box of one layer or expert.
        single = itertools.takewhile(lambda pair: pair[1] == 1, zip(start, size, strict=True))
        return self._read_chunks(key, tuple(place for place, _ in single)[:2], start, size)

    def read_box(self, row: Row, box: Box) -> Tensor:
        """Return a box of a row's piece: a view of the file if one chunk covers it, else a copy.

        Raises:
            BadInput: the chunks do not fill the box, or a chunk is damaged.
        """
        start = (*row.offset, *(part.start for part in box))
        size = (*(1 for _ in row.offset), *(part.stop - part.start for part in box))
        return self._read_chunks(row.key, row.offset, start, size).view(size[len(row.offset) :])

    def _read_chunks(self, key: str, corner: Shape, start: Shape, size: Shape) -> Tensor:
        """Return the box at `start`; `corner` is where its chunks are indexed."""
        out: Tensor | None = None
        filled = 0
        chunks = self._chunks[key]
        # Axes along which chunks are longer are not indexed: a shorter corner finds them.
        while corner and corner not in chunks:
            corner = corner[:-1]
        for chunk in chunks[corner]:
            inside = overlap(Extent(start, size), chunk)
            if inside is None:
                continue
            part = load_pages(self._read_chunk(key, chunk)[inside.stored])
            # One chunk covers the whole box, and no copy is needed.
            if part.numel() == prod(size):
                return part
            out = torch.empty(size, dtype=self.dtype(key)) if out is None else out
            out[inside.wanted] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise self._unfilled_error(key)
        return out


def wrong_shape_error(folder: Path, key: str, stored: Shape, wanted: Shape) -> BadInput:
    """Return the error for a tensor that does not have the shape that the config gives it."""
    return BadInput(
        f"{folder}: tensor {key} has shape {list(stored)}, but the Hugging Face config makes it "
        f"{list(wanted)}. They are different models."
    )


def _chunks_by_corner(tensor: ChunkedTensor) -> dict[Shape, list[Chunk]]:
    """Index the chunks by corner: () for all, (layer,), and (layer, expert).

    Megatron stores each layer and each expert separately, so a chunk has size 1 on those axes. Its
    conversion tools do not. An axis on which any chunk is longer is not indexed, nor is the next.
    """
    table: dict[Shape, list[Chunk]] = defaultdict(list)
    depth = 0
    while depth < 2 and all(chunk.sizes[depth : depth + 1] == (1,) for chunk in tensor.chunks):
        depth += 1
    for chunk in tensor.chunks:
        for axes in range(depth + 1):
            table[chunk.offsets[:axes]].append(chunk)
    return table


def stack_layers(
    stored: MegatronCheckpoint, dialect: Dialect | None, architecture: Architecture
) -> MegatronCheckpoint:
    """Return a checkpoint with the layers stacked that the table has stacked."""
    towers = [] if dialect is None else [dialect.vision]
    if architecture.stacks_layers:
        towers.append("" if dialect is None else dialect.language)
    return StackedLayers(stored, [tower + LAYERS for tower in towers]) if towers else stored


class OtherKeys(MegatronCheckpoint):
    """The tensors of `stored` under other keys."""

    def __init__(self, stored: MegatronCheckpoint, index: CheckpointIndex) -> None:
        self._stored = stored
        super().__init__(stored.folder, index, stored.data_files)
        self.files = stored.files

    def check_data(self) -> None:
        self._stored.check_data()

    def _unfilled_error(self, key: str) -> BadInput:
        return self._stored._unfilled_error(key)

    def arguments(self) -> Mapping[str, Any]:
        return self._stored.arguments()


class PairedLayers(OtherKeys):
    """The tensors of a ``HybridModel`` under the keys of a ``GPTModel``, a number for each layer.

    Args:
        prefix: of the language model's keys.

    Raises:
        BadInput: as `keys_of_pairs`.
    """

    def __init__(self, stored: MegatronCheckpoint, prefix: str) -> None:
        tensors = stored.index.tensors
        self._theirs = keys_of_pairs(stored.folder, tensors, prefix)
        named = {ours: tensors[theirs] for ours, theirs in self._theirs.items()}
        super().__init__(stored, CheckpointIndex(named, stored.index.objects))

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        return self._stored._read_chunk(self._theirs[key], chunk)

    def arguments(self) -> Mapping[str, Any]:
        """Return them without the number of layers, which counts attention and MLP apart."""
        saved = self._stored.arguments()
        return {name: value for name, value in saved.items() if name != "num_layers"}


class StackedLayers(OtherKeys):
    """The tensors of a checkpoint, in which layers with keys of their own become one tensor.

    Megatron gives each layer of all its transformers a key of its own if ``--moe-layer-freq`` is a
    list, even if all layers are alike, and so does a ``HybridModel``. Other checkpoints stay as
    they are.

    Args:
        starts: what precedes a layer's number in its keys.

    Raises:
        BadInput: the layers of one tensor differ in shape or dtype, one is missing, or the tensor
            is there too.
    """

    def __init__(self, stored: MegatronCheckpoint, starts: Iterable[str]) -> None:
        self._layer_keys: dict[tuple[str, Shape], str] = {}  # key by tensor and (layer,)
        index, layers = CheckpointIndex(objects=stored.index.objects), Counter[str]()
        pattern = re.compile(rf"({'|'.join(map(re.escape, starts))})(0|[1-9]\d{{0,3}})\.")
        for key, entry in stored.index.tensors.items():
            if (match := pattern.match(key)) is None:
                index.tensors[key] = entry
            else:
                name = match[1] + key[match.end() :]
                self._layer_keys[name, (int(match[2]),)] = key
                layers[name] += 1
        for (name, place), key in self._layer_keys.items():
            entry = stored.index.tensors[key]
            shape = (layers[name], *entry.shape)
            stack = index.tensors.setdefault(name, ChunkedTensor(entry.dtype, shape))
            alike = (stack.dtype, stack.shape) == (entry.dtype, shape)
            if not alike or place[0] >= layers[name] or name in stored.index.tensors:
                raise BadInput(
                    f"{stored.folder}: {key} does not fit the {layers[name]} layers that have such "
                    "a tensor. One is missing, or files of two checkpoints are mixed."
                )
            stack.chunks += [
                Chunk((*place, *c.offsets), (1, *c.sizes), c.data) for c in entry.chunks
            ]
        super().__init__(stored, index)

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        if (layer_key := self._layer_keys.get((key, chunk.offsets[:1]))) is None:
            return self._stored._read_chunk(key, chunk)
        part = Chunk(chunk.offsets[1:], chunk.sizes[1:], chunk.data)
        return self._stored._read_chunk(layer_key, part).unsqueeze(0)


class TranslatedCheckpoint(OtherKeys):
    """The tensors of a checkpoint in a dialect.

    The language model's chunks are those of the stored tensors, but where rows are in another
    order: those that stay together are one chunk. Each tensor of the vision tower is one chunk,
    unless it is stored as the table has it. `index` lists a tensor that the dialect does not know
    under its own key.

    A norm's weight w that is stored as w - 1 is computed in float32, as Transformer Engine does
    before it multiplies by it. If one of them would be rounded in the stored dtype, all are
    float32.

    Raises:
        BadInput: a tensor that differs in more than its key has another shape than the config gives
            it, or a tensor is there under two keys.
    """

    def __init__(
        self, stored: MegatronCheckpoint, dialect: Dialect, architecture: Architecture
    ) -> None:
        self.dialect, self._language = dialect, dialect.language
        self._vision: dict[str, tuple[Row, Row]] = {}
        self._rearranged: dict[str, str] = {}  # key of the tensor that holds the rows
        tensors, index = dict(stored.index.tensors), CheckpointIndex(objects=stored.index.objects)
        translated = set()

        def stored_tensor(theirs: Row) -> ChunkedTensor | None:
            if (entry := tensors.get(theirs.key)) is None:
                return None
            if entry.shape != theirs.global_shape:
                raise wrong_shape_error(stored.folder, theirs.key, entry.shape, theirs.global_shape)
            translated.add(theirs.key)
            return entry

        rows = table(architecture, mtp=True)
        for fused, parts in dialect.rearranged_rows(rows, architecture):
            if (entry := stored_tensor(fused)) is None:
                continue
            for row in parts:
                chunks = [*_chunks_of_rows(fused, row)]
                index.tensors[row.key] = ChunkedTensor(entry.dtype, row.global_shape, chunks)
                self._rearranged[row.key] = fused.key
        vision = architecture.vision
        for row in vision_rows(vision):
            theirs = dialect.stored_vision_row(row, vision)
            if theirs == row or (entry := stored_tensor(theirs)) is None:
                continue
            corner = (0,) * len(row.shape)
            single_chunk = Chunk(corner, row.shape, FileRange(theirs.key, 0, 0))
            index.tensors[row.key] = ChunkedTensor(entry.dtype, row.shape, [single_chunk])
            self._vision[row.key] = row, theirs
        for key, entry in tensors.items():
            if key in translated:
                continue
            if (name := key.removeprefix(dialect.language)) in index.tensors:
                raise BadInput(
                    f"{stored.folder} holds the tensor {name} under two keys: files of two "
                    "checkpoints are mixed."
                )
            index.tensors[name] = entry
        self._centred = dialect.centred_keys(rows) & index.tensors.keys()
        super().__init__(stored, index)
        if any(_would_be_rounded(stored.tensor(dialect.language + key)) for key in self._centred):
            for key in self._centred:
                index.tensors[key] = replace(index.tensors[key], dtype=torch.float32)

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        if key in self._rearranged:
            start = (chunk.data.offset, *chunk.offsets[1:])
            return self._stored._read_chunks(self._rearranged[key], (), start, chunk.sizes)
        if key not in self._vision:
            theirs_key = self._language + key
            stored_key = theirs_key if theirs_key in self._stored.index.tensors else key
            values = self._stored._read_chunk(stored_key, chunk)
            return (values.float() + 1).to(self.dtype(key)) if key in self._centred else values
        row, theirs = self._vision[key]
        values = self._stored.read_box(theirs, tuple(slice(0, n) for n in theirs.shape))
        return row.to_mcore(*theirs.to_hf(values))


def _chunks_of_rows(fused: Row, row: Row) -> Iterator[Chunk]:
    """Yield the chunks of `row`, whose data's offset is a row of the tensor of `fused`."""
    columns = row.shape[1:]
    for source, start, stop, first in row.rearrangement.placed():
        for other, begin, end, there in fused.rearrangement.placed():
            low, high = max(start, begin), min(stop, end)
            if fused.sources[other] == row.sources[source] and low < high:
                data = FileRange(fused.key, there + low - begin, high - low)
                corner = (first + low - start, *(0 for _ in columns))
                yield Chunk(corner, (high - low, *columns), data)


def _would_be_rounded(centred: Tensor) -> bool:
    """Return whether any weight, which is stored less one, would be rounded in the dtype stored."""
    weight = centred.float() + 1
    return not torch.equal(weight.to(centred.dtype).float(), weight)


@dataclass(frozen=True)
class CheckpointFormat:
    """One format of Megatron checkpoints.

    Attributes:
        name: its value of Megatron's ``--ckpt-format``.
        title: its name in messages.
        open: opens the checkpoint in an iteration's folder, of a model with the given architecture.
        plan: ``plan(source, layout, spec, *, dtype, make_vocab_size_divisible_by)`` plans a
            conversion to a format that loads under one layout only; see
            `to_mcore.plan_hf_to_mcore`. None if the format loads under any layout.
        check_run: ``check_run(folder, args)`` raises BadInput if a run with Megatron's arguments
            `args` could not load the checkpoint in `folder`.
    """

    name: str
    title: str
    open: Callable[[Path, Architecture], MegatronCheckpoint]
    plan: Callable[..., Any] | None = None
    check_run: Callable[[Path, Namespace], None] = lambda folder, args: None


@cache
def formats() -> dict[str, CheckpointFormat]:
    """Return every known format, by name."""
    # Imported by name, since the modules themselves import this one.
    return {name: import_module(files.module).FORMAT for name, files in FORMATS.items()}


def format_named(name: str) -> CheckpointFormat:
    """Return the format with this name; raise BadInput if there is none."""
    if name not in formats():
        raise BadInput(
            f"checkpoint format {name!r} is not known here; {' and '.join(sorted(formats()))} "
            f"can be written. {DEFAULT_FORMAT} loads under any layout."
        )
    return formats()[name]


def format_of(place: CheckpointPlace) -> CheckpointFormat:
    """Return the format of a Megatron checkpoint, or the default one for anything else."""
    return formats()[place.format or DEFAULT_FORMAT]


def open_megatron(place: CheckpointPlace, architecture: Architecture) -> MegatronCheckpoint:
    """Open a checkpoint or iteration, whatever its format and whoever wrote it.

    Raises:
        BadInput: the checkpoint has no known format, is damaged or incomplete, has the keys of an
            unknown maker, or holds an adapter alone.
    """
    folder, format = place.weights(), format_of(place)
    stored = format.open(folder, architecture)
    if EMBEDDING not in stored.index.tensors:
        place.require_base()  # it may be a LoRA run's, which has no base weights
    if format.plan is not None:  # a file of one layout, from which only our own keys are read
        require_own_keys(folder, stored.index.tensors)
        return stored
    dialect = dialect_of(folder, stored.index.tensors)
    if dialect is None:  # the mapping table's own keys; `dialect_of` refuses an unknown maker's
        try:
            return stack_layers(stored, None, architecture)
        except BadInput:  # another model, or a layer is missing: who reads it names the tensor
            return stored
    dialect.require_architecture(architecture)
    if dialect.language + HYBRID_NORM in stored.index.tensors:
        # Megatron's HybridModel, alone or as the language model of another maker's.
        HYBRID.require_architecture(architecture)
        stored = PairedLayers(stored, dialect.language)
    return TranslatedCheckpoint(stack_layers(stored, dialect, architecture), dialect, architecture)


def require_own_keys(folder: Path, keys: Iterable[str]) -> None:
    """Raise BadInput if `keys` are another maker's: in a file of one layout these are not read."""
    dialect = dialect_of(folder, keys)
    if dialect is not None:
        title = format_of(identify(folder)).title
        raise BadInput(
            f"{folder} has the keys of {dialect.maker} and is of {title}, in "
            f"which they are not read. Save it there with --ckpt-format {DEFAULT_FORMAT}."
        )
