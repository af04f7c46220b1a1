"""Megatron checkpoints whose keys are not the table's, read as if they were."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.dialects import Dialect, keys_of_pairs
from mcore_qwen3vl.converters.mapping.table import LAYERS, Row, table, vision_rows
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
    wrong_shape_error,
)
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput


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
