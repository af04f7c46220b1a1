"""Megatron's legacy checkpoints (``--ckpt-format torch``), read as the table's tensors.

A legacy checkpoint is one file for each model-parallel rank, with that rank's parameters under the
names of its layer spec. The files are mapped, and their tensors are read as the parts of whole
ones that they are; optimizer and random states beside them are never touched.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.boxes import fill
from mcore_qwen3vl.converters.dcp_metadata import CheckpointIndex, Chunk, Place, StoredTensor
from mcore_qwen3vl.converters.legacy_layout import (
    FILE,
    OUTPUT,
    Rank,
    Spec,
    Stage,
    local_name,
    model_key,
    place,
    share_out,
    stages,
)
from mcore_qwen3vl.converters.mapping import EMBEDDING, Row, Shape, table
from mcore_qwen3vl.converters.megatron import MegatronCheckpoint, _by_corner, iteration_folder
from mcore_qwen3vl.converters.torch_load import load
from mcore_qwen3vl.converters.torch_zip import STORAGES
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.parallel import Layout


def is_legacy(path: Path) -> bool:
    """Whether `path`, a Megatron checkpoint or one iteration of it, is of the legacy format."""
    return any(iteration_folder(path).glob(f"mp_rank_*/{FILE}"))


def open_megatron(path: Path, architecture: Architecture) -> MegatronCheckpoint:
    """The checkpoint at `path`, in either format.

    Args:
        path: checkpoint directory, or the folder of one iteration.
        architecture: the model that it should be.

    Raises:
        BadInput: it is neither format, damaged or incomplete.
    """
    return LegacyCheckpoint(path, architecture) if is_legacy(path) else MegatronCheckpoint(path)


@dataclass(frozen=True)
class _RankFile:
    """One file: where, of which rank, and the parameters of each of the rank's chunks."""

    path: Path
    rank: Rank
    layout: Layout
    models: list[dict[str, Any]]


class LegacyCheckpoint(MegatronCheckpoint):
    """The tensors of one legacy checkpoint, put together from the ranks' files.

    Attributes:
        folder: the iteration's folder.
        index: every tensor of the table with its dtype, shape and chunks; parameters that the table
            does not know are there under their own names.
        layout: the parallel sizes that it was saved under.

    Raises:
        BadInput: not a legacy checkpoint, a damaged file, one with more in it than tensors and
            Megatron's own state, or a rank's file is absent.
    """

    def __init__(self, path: Path, architecture: Architecture) -> None:
        self.folder = iteration_folder(path)
        self._ranks = _open(self.folder)
        self.layout = self._ranks[0].layout
        self._experts = architecture.num_experts // self.layout.ep
        self._by_tp = {(f.rank.pp, f.rank.tp): f for f in reversed(self._ranks)}
        self._by_etp = {
            (f.rank.pp, f.rank.ep, f.rank.tp % self.layout.etp): f for f in reversed(self._ranks)
        }
        self._require_all_ranks()
        self.index = CheckpointIndex()
        self._tensors: dict[tuple[str, Shape], Tensor] = {}
        self._collect(architecture)
        self._chunks = {key: _by_corner(tensor) for key, tensor in self.index.tensors.items()}

    @property
    def data_files(self) -> list[Path]:
        return [file.path for file in self._ranks]

    @property
    def files(self) -> list[Path]:
        return self.data_files

    def _collect(self, a: Architecture) -> None:
        """Find each row's parts, and what is left over."""
        pipeline = self._pipeline()
        vocabulary = self._by_tp[0, 0].models[0].get(EMBEDDING)
        padded = len(vocabulary) * self.layout.tp if isinstance(vocabulary, Tensor) else 0
        rows = table(a, expert_layout="published", padded_vocab_size=max(padded, a.vocab_size))
        layers = sum(len(stage.layers) for stage in pipeline)
        shares = share_out(rows, pipeline, tied=a.tie_word_embeddings)
        for stage, held in zip(pipeline, shares, strict=True):
            known = set()
            for row in held:
                for name in self._names(row, stage):
                    known.add(name)
                    if not (a.tie_word_embeddings and name == OUTPUT):  # the embedding's copy
                        self._add(row, stage, name, layers)
            self._add_unknown(stage, known)

    def _pipeline(self) -> list[Stage]:
        sizes = self.layout
        return stages(
            [
                [_layers(self._by_tp[pp, 0].models[vp]) for pp in range(sizes.pp)]
                for vp in range(sizes.vpp)
            ]
        )

    def _names(self, row: Row, stage: Stage) -> set[str]:
        """The names of `row` under which the ranks of `stage` have something: one, or none."""
        state = self._file(row, stage, 0).models[stage.vp]
        names = {local_name(row, stage, self._experts, spec) for spec in get_args(Spec)}
        return {name for name in names if name in state}

    def _file(self, row: Row, stage: Stage, part: int) -> _RankFile:
        _, expert = place(row)
        if expert is None:
            return self._by_tp[stage.pp, part]
        return self._by_etp[stage.pp, expert // self._experts, part]

    def _add(self, row: Row, stage: Stage, name: str, layers: int) -> None:
        """Enter the ranks' parts of `row`, each cut into what is one box of the whole."""
        parts = 1
        if row.tp_axis is not None:
            parts = self.layout.tp if place(row)[1] is None else self.layout.etp
        for part in range(parts):
            file = self._file(row, stage, part)
            local = _tensor(file, stage, name)
            stored = self._stored(row, local, parts, layers, file, name)
            for offsets, box in _cut(row, local, part, parts):
                corner = (*row.offset, *offsets)
                sizes = (*(1 for _ in row.offset), *box.shape)
                stored.chunks.append(Chunk(corner, sizes, Place(file.path.name, 0, 0)))
                self._tensors[row.key, corner] = box[(None,) * len(row.offset)]

    def _stored(
        self, row: Row, local: Tensor, parts: int, layers: int, file: _RankFile, name: str
    ) -> StoredTensor:
        """The entry of the row's tensor; its shape is what the files say, not the config."""
        shape = list(local.shape)
        if row.tp_axis is not None and row.tp_axis < len(shape):
            shape[row.tp_axis] *= parts
        stacked = list(row.global_shape[: len(row.offset)])
        if stacked and len(row.offset) > (place(row)[1] is not None):
            stacked[0] = layers
        whole = (*stacked, *shape)
        stored = self.index.tensors.setdefault(row.key, StoredTensor(local.dtype, whole))
        if (stored.dtype, stored.shape) != (local.dtype, whole):
            raise BadInput(
                f"{file.path}: {name} makes {row.key} {list(whole)} {local.dtype}, but other ranks "
                f"or layers make it {list(stored.shape)} {stored.dtype}. The files do not belong "
                "together."
            )
        return stored

    def _add_unknown(self, stage: Stage, known: set[str]) -> None:
        for file in self._ranks:
            if file.rank.pp != stage.pp:
                continue
            for name in file.models[stage.vp]:
                if name in known or name.endswith("_extra_state"):
                    continue
                tensor = _tensor(file, stage, name)
                self.index.tensors[f"{file.path.parent.name}/{name}"] = StoredTensor(
                    tensor.dtype, tuple(tensor.shape)
                )

    def require(self, rows: Iterable[Row]) -> None:
        super().require(rows)
        for key, tensor in self.index.tensors.items():
            if not fill(tensor.chunks, tensor.shape):
                raise self._unfilled(key)

    def _unfilled(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder}: the ranks' parts of {key} do not make up the whole tensor. A layer or "
            "an expert is missing from a rank's file."
        )

    def _tensor(self, key: str, chunk: Chunk) -> Tensor:
        return self._tensors[key, chunk.offsets]

    def _require_all_ranks(self) -> None:
        sizes = self.layout
        for pp in range(sizes.pp):
            for tp in range(sizes.tp):
                if (pp, tp) not in self._by_tp:
                    raise self._absent(f"tensor-parallel rank {tp} of pipeline rank {pp}")
            for ep in range(sizes.ep):
                for etp in range(sizes.etp):
                    if (pp, ep, etp) not in self._by_etp:
                        raise self._absent(f"expert-parallel rank {ep} of pipeline rank {pp}")

    def _absent(self, which: str) -> BadInput:
        return BadInput(
            f"{self.folder} was saved under {self.layout} and has no file of {which}. Copy the "
            "checkpoint again."
        )


def _open(folder: Path) -> list[_RankFile]:
    """Every rank's file, mapped.

    Raises:
        BadInput: there is none, one is damaged, or they are not of one checkpoint.
    """
    found = []
    for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        content = load(path)
        layout = _layout(content, path)
        models = [_state(content, model_key(vp, layout.vpp), path) for vp in range(layout.vpp)]
        found.append(_RankFile(path, _rank(path, layout), layout, models))
    if not found:
        raise BadInput(f"{folder} holds no mp_rank_*/{FILE}; it is no legacy checkpoint.")
    for file in found:
        if file.layout != found[0].layout:
            raise BadInput(
                f"{found[0].path} was saved under {found[0].layout} and {file.path} under "
                f"{file.layout}. They are of different checkpoints."
            )
    return found


def _layout(content: Any, path: Path) -> Layout:
    """The parallel sizes in the arguments that the file holds."""
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, Namespace):
        raise BadInput(
            f"{path} holds no arguments, so the layout that it was saved under is not known. Load "
            "it in Megatron and save it again."
        )
    tp = getattr(args, "tensor_model_parallel_size", None)
    layout = Layout(
        tp=_size(tp, path),
        pp=_size(getattr(args, "pipeline_model_parallel_size", None), path),
        vpp=_size(getattr(args, "virtual_pipeline_model_parallel_size", None) or 1, path),
        ep=_size(getattr(args, "expert_model_parallel_size", 1), path),
        etp=_size(getattr(args, "expert_tensor_parallel_size", None) or tp, path),
    )
    if not getattr(args, "num_experts", None):
        return replace(layout, ep=1, etp=1)
    if layout.tp % layout.etp:
        raise BadInput(
            f"{path} was saved under ETP {layout.etp} and TP {layout.tp}. ETP does not divide TP, "
            "and several ranks have written the same file: part of the experts is lost."
        )
    return layout


def _size(value: Any, path: Path) -> int:
    if type(value) is not int or value < 1:
        raise BadInput(f"{path}: the arguments give {value!r:.40} as a parallel size.")
    return value


def _rank(path: Path, layout: Layout) -> Rank:
    """The rank that the folder's name tells, read as the layout says it is written."""
    pattern = r"mp_rank_(\d{2,})" + r"_(\d{3,})" * ((layout.pp > 1) + (layout.ep > 1))
    match = re.fullmatch(pattern, path.parent.name)
    numbers = [int(number) for number in match.groups()] if match else []
    tp, *others = numbers or [layout.tp]
    pp = others.pop(0) if others and layout.pp > 1 else 0
    ep = others.pop(0) if others else 0
    if tp >= layout.tp or pp >= layout.pp or ep >= layout.ep:
        raise BadInput(f"{path}: the arguments say {layout}, which is not how its folder is named.")
    return Rank(tp, pp, ep)


def _state(content: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    state = content.get(key)
    if not isinstance(state, dict):
        raise BadInput(f"{path} holds no {key!r} with parameters, but {', '.join(content)}.")
    return state


def _layers(state: dict[str, Any]) -> int:
    """How many decoder layers a chunk has: one more than the last one's number."""
    numbers = (re.match(r"decoder\.layers\.(\d+)\.", name) for name in state)
    return max((int(found[1]) + 1 for found in numbers if found), default=0)


def _tensor(file: _RankFile, stage: Stage, name: str) -> Tensor:
    value = file.models[stage.vp].get(name)
    if not isinstance(value, Tensor) or value.dtype not in STORAGES:
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(
            f"{file.path}: {name} is {kind}; a tensor of {', '.join(map(str, STORAGES))} is read."
        )
    return value


def _cut(row: Row, local: Tensor, part: int, parts: int) -> Iterator[tuple[Shape, Tensor]]:
    """Part number `part` of `parts` in boxes of the whole: each one's corner and values."""
    axis = row.tp_axis
    if axis is None or local.dim() <= axis:
        yield (0,) * local.dim(), local
        return
    width = local.shape[axis] // row.tp_parts
    for number in range(row.tp_parts):
        start = (number * parts + part) * width
        corner = tuple(start if i == axis else 0 for i in range(local.dim()))
        yield corner, local.narrow(axis, number * width, width)
