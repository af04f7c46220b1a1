"""Megatron's legacy format (``--ckpt-format torch``): read as the table's tensors, and written.

A legacy checkpoint has one file for each model-parallel rank: what ``state_dict()`` returns there.
So names are those of the layer spec, layers and experts are numbered from zero on every rank, and
each rank has its part of a tensor. The table says what a tensor is and along which axis it is cut;
this module says which rank gets which part, and under which name.

The files are mapped, checked against each other and against a run, and their tensors are assembled
into whole tensors; the data of the optimizer and random states in the files is never read.

To write, `plan` makes each rank's file a unit of work; further units compute the manifest's
checksums.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.formats import CheckpointFormat, require_own_keys
from mcore_qwen3vl.converters.identify import RELEASE
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, Row, max_rows, table
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
)
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.converters.offline.engine import ConversionPlan, Unit
from mcore_qwen3vl.converters.offline.to_mcore import ToMcore
from mcore_qwen3vl.converters.storage.archive import (
    STORAGES,
    BadArchive,
    Described,
    Sums,
    load,
    write_archive,
)
from mcore_qwen3vl.converters.storage.boxes import Box, Selection, Shape, are_exact_cover
from mcore_qwen3vl.converters.storage.disk import DirectFile
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.megatron_config import architecture_arguments


class LegacyCheckpoint(MegatronCheckpoint):
    """The tensors of one legacy checkpoint, assembled from the ranks' files.

    `index` lists a parameter that the table does not know as ``FOLDER/NAME``, with the name of its
    rank's folder.

    Raises:
        BadInput: it is no folder of a legacy checkpoint; a file is damaged, or holds more than
            tensors and Megatron's own state; or a rank's file is absent.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        _require_equal_parts(architecture)
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
            if not are_exact_cover(tensor.chunks, tensor.shape):
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

    def _find_parts(self, architecture: Architecture) -> None:
        """Fill the index with the parts of each row's tensor in the ranks' files."""
        pp, vpp = range(self.layout.pp), range(self.layout.vpp)
        pipeline = _pipeline_stages(
            [[self._by_tp[rank, 0].layer_count(vp) for rank in pp] for vp in vpp]
        )
        self._layer_count = sum(len(stage.layers) for stage in pipeline)
        vocabulary = self._by_tp[0, 0].models[0].get(EMBEDDING)
        padded = len(vocabulary) * self.layout.tp if isinstance(vocabulary, Tensor) else 0
        rows = table(
            architecture,
            expert_layout="published",
            padded_vocab_size=max(padded, architecture.vocab_size),
        )
        shares = _rows_by_stage(rows, pipeline, tied=architecture.tie_word_embeddings)
        for stage, stage_rows in zip(pipeline, shares, strict=True):
            known = set()
            for row in stage_rows:
                for name in self._stored_names(row, stage):
                    known.add(name)
                    # A tied head is the embedding's copy.
                    if not (architecture.tie_word_embeddings and name == OUTPUT):
                        self._add_parts(row, stage, name)
            self._add_unknown(stage, known)

    def _stored_names(self, row: Row, stage: Stage) -> set[str]:
        """Return the names of `row` in the files of `stage`: at most one if no file is damaged."""
        states = [
            self._file_of_part(row, stage, n).models[stage.vp] for n in range(self._part_count(row))
        ]
        names = {_local_name(row, stage, self._experts, spec) for spec in get_args(Spec)}
        return {name for name in names if any(name in state for state in states)}

    def _part_count(self, row: Row) -> int:
        """Return how many tensor-parallel parts `row` is stored in; 1 if it is not divided."""
        if row.tp_axis is None:
            return 1
        return self.layout.tp if row.expert is None else self.layout.etp

    def _file_of_part(self, row: Row, stage: Stage, part: int) -> RankFile:
        """Return one file with part number `part` of `row`; other files may have copies of it."""
        if row.expert is None:
            return self._by_tp[stage.pp, part]
        return self._by_etp[stage.pp, row.expert // self._experts, part]

    def _add_parts(self, row: Row, stage: Stage, name: str) -> None:
        """Add the ranks' parts of `row` to the index, each cut into boxes of the whole."""
        count = self._part_count(row)
        for part in range(count):
            file = self._file_of_part(row, stage, part)
            local = file.tensor(stage.vp, name)
            size = [n * count if axis == row.tp_axis else n for axis, n in enumerate(local.shape)]
            stored = self._index_entry(row, local, tuple(size), f"{file.path}: {name}")
            places = _rank_boxes(row, tuple(size), part, count)
            pieces, axis = len(places), row.tp_axis or 0
            cuts = [local] if pieces == 1 else local.tensor_split(pieces, axis)
            for box, values in zip(places, cuts, strict=True):
                corner = (*row.offset, *(side.start for side in box))
                # Each stacked axis has size 1 in a chunk. The values are in memory, so no range is
                # given.
                values = values[(None,) * len(row.offset)]
                stored.chunks.append(Chunk(corner, tuple(values.shape), FileRange(FILE, 0, 0)))
                self._values[row.key, corner] = values

    def _index_entry(self, row: Row, local: Tensor, shape: Shape, where: str) -> ChunkedTensor:
        """Return the index entry of the row's tensor, with the shape in the files, not the config.

        Raise BadInput if ranks or layers disagree on its dtype or shape.
        """
        stacked = list(row.global_shape[: len(row.offset)])
        # An axis of layers comes before that of experts: the files say how many there are.
        if len(stacked) > (row.expert is not None):
            stacked[0] = self._layer_count
        global_shape = (*stacked, *shape)
        entry = self.index.tensors.setdefault(row.key, ChunkedTensor(local.dtype, global_shape))
        if (entry.dtype, entry.shape) != (local.dtype, global_shape):
            raise BadInput(
                f"{where} has {row.key} {list(global_shape)} {local.dtype}, but other ranks or "
                f"layers have {list(entry.shape)} {entry.dtype}. The files do not belong together."
            )
        return entry

    def _add_unknown(self, stage: Stage, known: set[str]) -> None:
        """List the parameters that no row makes, so that `require` refuses them."""
        for file in self._ranks:
            if file.rank.pp != stage.pp:
                continue
            for name in file.models[stage.vp]:
                if name in known or name.endswith("_extra_state"):
                    continue
                tensor = file.tensor(stage.vp, name)
                entry = ChunkedTensor(tensor.dtype, tuple(tensor.shape))
                self.index.tensors[f"{file.path.parent.name}/{name}"] = entry


_COMPARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_COMPARED_IN_MOE = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def saved_arguments(folder: Path) -> Namespace:
    """Return Megatron's arguments of the run that saved the legacy checkpoint in `folder`.

    Raises:
        BadInput: there is no such checkpoint, or it is damaged or holds no arguments.
    """
    path = _paths_of_ranks(folder)[0]
    return _arguments_in(load(path), path)


def _paths_of_ranks(folder: Path) -> list[Path]:
    if not (paths := sorted(folder.glob(f"mp_rank_*/{FILE}"))):
        raise BadInput(f"{folder} holds no mp_rank_*/{FILE}; it is not a legacy checkpoint.")
    return paths


@dataclass(frozen=True)
class RankFile:
    """The mapped file of one rank."""

    path: Path
    rank: ModelParallelRank
    layout: Layout
    models: list[dict[str, Any]]

    def tensor(self, vp: int, name: str) -> Tensor:
        """Return parameter `name` of chunk `vp`."""
        if name not in self.models[vp]:
            raise BadInput(
                f"{self.path} lacks the parameter {name}, which other ranks have. The files do not "
                "belong together."
            )
        value = self.models[vp][name]
        if not isinstance(value, Tensor) or value.dtype not in STORAGES:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise BadInput(
                f"{self.path}: {name} is {kind}; it must be a tensor of "
                f"{', '.join(map(str, STORAGES))}."
            )
        return value

    def layer_count(self, vp: int) -> int:
        """Return the number of decoder layers in chunk `vp`: one more than the highest index."""
        # A larger number is no layer's; it is left over, and refused by its name.
        numbers = (re.match(r"decoder\.layers\.(\d{1,4})\.", name) for name in self.models[vp])
        return max((int(match[1]) + 1 for match in numbers if match), default=0)


def open_ranks(folder: Path, sums: Sums | None = None) -> list[RankFile]:
    """Map every rank's file; note the checksums of its tensors' data in `sums`.

    Raises:
        BadInput: there are no files, one is damaged or missing, or they belong to different
            checkpoints.
    """
    rank_files = []
    for path in _paths_of_ranks(folder):
        refuse_special_files(path.parent)
        content = load(path, sums=sums)
        layout = _layout_in(content, path)
        models = [
            _named_parameters(content, _model_key(vp, layout.vpp), path) for vp in range(layout.vpp)
        ]
        rank_files.append(RankFile(path, _rank_in_path(path, layout), layout, models))
    for file in rank_files:
        if file.layout != rank_files[0].layout:
            raise BadInput(
                f"{rank_files[0].path} was saved under {rank_files[0].layout} and {file.path} "
                f"under {file.layout}. They are of different checkpoints."
            )
    _require_all_ranks(folder, rank_files)
    return rank_files


def _require_all_ranks(folder: Path, rank_files: list[RankFile]) -> None:
    """Raise BadInput unless the files hold every part of each tensor, and every expert."""
    layout = rank_files[0].layout
    tp = {(file.rank.pp, file.rank.tp) for file in rank_files}
    experts = {(file.rank.pp, file.rank.ep, file.rank.tp % layout.etp) for file in rank_files}
    for pp in range(layout.pp):
        absent = [f"TP rank {n}" for n in range(layout.tp) if (pp, n) not in tp]
        absent += [
            f"EP rank {n}"
            for n in range(layout.ep)
            if not all((pp, n, etp) in experts for etp in range(layout.etp))
        ]
        if absent:
            raise BadInput(
                f"{folder} was saved under {layout} and lacks a file of {absent[0]}, PP rank {pp}. "
                "Copy the checkpoint again."
            )


def _arguments_in(content: Any, path: Path) -> Namespace:
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, Namespace):
        raise BadInput(
            f"{path} holds no arguments, so the layout that it was saved under is not known. Load "
            "it in Megatron and save it again."
        )
    return args


def _layout_in(content: Any, path: Path) -> Layout:
    """Return the layout in a rank's file; without experts, EP and ETP are 1."""
    args = _arguments_in(content, path)
    tp = getattr(args, "tensor_model_parallel_size", None)
    sizes: dict[str, Any] = {
        "tp": tp,
        "pp": getattr(args, "pipeline_model_parallel_size", None),
        "vpp": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "ep": getattr(args, "expert_model_parallel_size", 1),
        "etp": getattr(args, "expert_tensor_parallel_size", None) or tp,
    }
    for value in sizes.values():
        if type(value) is not int or value < 1:
            shown = value if type(value) is int else f"a {type(value).__name__}"
            raise BadInput(
                f"{path}: the arguments give {shown} as a parallel size. Copy the checkpoint again."
            )
    layout = Layout(**sizes)
    if not getattr(args, "num_experts", None):
        return replace(layout, ep=1, etp=1)
    if layout.tp % layout.etp:
        raise BadInput(
            f"{path} was saved under ETP {layout.etp} and TP {layout.tp}. ETP does not divide TP, "
            "and several ranks have written the same file: part of the experts is lost."
        )
    return layout


def _rank_in_path(path: Path, layout: Layout) -> ModelParallelRank:
    """Parse the rank from the folder's name, whose form depends on the layout."""
    pattern = r"mp_rank_(\d{2,})" + r"_(\d{3,})" * ((layout.pp > 1) + (layout.ep > 1))
    match = re.fullmatch(pattern, path.parent.name)
    numbers = [int(number) for number in match.groups()] if match else []
    # Without a number the rank is out of range, and refused below.
    tp, *others = numbers or [layout.tp]
    pp = others.pop(0) if others and layout.pp > 1 else 0
    ep = others.pop(0) if others else 0
    if tp >= layout.tp or pp >= layout.pp or ep >= layout.ep:
        raise BadInput(
            f"{path}: the arguments say {layout}, but the name of its folder says another layout."
        )
    return ModelParallelRank(tp, pp, ep)


def _named_parameters(content: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the state of one virtual stage in a rank's file; raise BadInput without it."""
    state = content.get(key)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        there = ", ".join(_shorten(name) for name in content)
        raise BadInput(
            f"{path} holds no {key!r} with parameters by their names, but {there:.200}. Copy it "
            "again."
        )
    return state


def check_run(folder: Path, args: Namespace) -> None:
    """Check that the legacy checkpoint in `folder` is for the run that `args` describe.

    Megatron itself exits with code 0 if a rank's file is missing. A virtual stage that is missing
    from the file keeps its random values. So do parameters with another name in another spec.

    Raises:
        BadInput: the checkpoint is for another layout or layer spec (the message names both
            values), is another maker's, or its optimizer state is for other parameters.
    """
    saved = saved_arguments(folder)
    names = [*_COMPARED, *(_COMPARED_IN_MOE if args.num_experts else ())]
    if getattr(saved, "spec", None) is not None:  # Megatron's own models have none
        names.append("spec")
    different = [
        f"{name} {_shorten(getattr(saved, name))} instead of {getattr(args, name)}"
        for name in names
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if different:
        raise BadInput(
            f"{folder} is a legacy checkpoint, which loads only under its own layout. It was "
            f"saved with {', '.join(different)}. Change the flags, or convert it: mcore-qwen3vl "
            "convert mcore-to-hf, then --load-hf."
        )
    require_own_keys(folder, open_ranks(folder)[0].models[0])
    if folder.name != RELEASE and not (args.finetune or args.no_load_optim):
        # The optimizer's state has no names, only the order of the parameters. Each expert of the
        # torch spec used to be one parameter; now one parameter holds all experts.
        apart = not getattr(saved, "moe_grouped_gemm", True)
        if args.num_experts and args.spec == ["torch"] and apart:
            raise BadInput(
                f"{folder} is a legacy checkpoint in which each expert is a parameter of its own, "
                "so its optimizer state does not fit this version. Continue from its weights with "
                "--no-load-optim."
            )


def _shorten(value: Any) -> str:
    """Shorten a value from a file for a message; only these types are sure to give short text."""
    items = value if isinstance(value, list) else [value]
    plain = all(item is None or isinstance(item, int | str) for item in items)
    return f"{value!s:.80}" if plain else f"a {type(value).__name__}"


Spec = Literal["te", "torch"]
"""The layer spec that decides the parameters' names."""

FILE = "model_optim_rng.pt"
OUTPUT, FINAL_NORM = "output_layer.weight", "decoder.final_layernorm.weight"
_LAYERS, _SEQUENTIAL = "decoder.layers.", "mlp.experts.local_experts."
_STANDALONE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that Transformer Engine, but not the torch spec, fuses into the next linear layer."""


@dataclass(frozen=True)
class ModelParallelRank:
    """One model-parallel position; all ranks in it hold the same parameters."""

    tp: int
    pp: int
    ep: int

    def folder_name(self, layout: Layout) -> str:
        """Return the name of the rank's folder.

        Source: ``megatron.training.checkpointing.get_checkpoint_name``.
        """
        name = f"mp_rank_{self.tp:02d}"
        name += f"_{self.pp:03d}" if layout.pp > 1 else ""
        return name + (f"_{self.ep:03d}" if layout.ep > 1 else "")

    def share(self, row: Row, layout: Layout) -> tuple[int, int]:
        """Return which part of `row` the rank holds, and of how many along the row's TP axis.

        Megatron numbers TP and ETP ranks along the same axis, so the ETP rank follows from the TP
        rank if ETP divides TP.
        """
        if row.expert is None:
            return self.tp, layout.tp
        return self.tp % layout.etp, layout.etp


def _require_equal_parts(architecture: Architecture) -> None:
    """Raise BadInput for a model whose tensors a rank does not hold in equal parts of one kind."""
    if architecture.delta_net is not None:
        raise BadInput(
            "The legacy format (--format torch) is neither written nor read for Qwen3.5, whose "
            "delta nets join six tensors of unequal sizes in each rank's file: use torch_dist, "
            "which loads under any layout."
        )


def _ranks_with_files(layout: Layout) -> list[ModelParallelRank]:
    """Return one rank per file: the pairs of TP and EP rank that occur in each pipeline stage."""
    # The pairs repeat after so many ranks.
    numbers = range(lcm(layout.tp, layout.etp * layout.ep))
    pairs = {(n % layout.tp, n // layout.etp % layout.ep) for n in numbers}
    return [ModelParallelRank(tp, pp, ep) for pp in range(layout.pp) for tp, ep in sorted(pairs)]


@dataclass(frozen=True)
class Stage:
    """One pipeline chunk.

    Attributes:
        pp, vp: pipeline rank, and virtual stage on that rank.
        layers: indices of its decoder layers in the whole model.
        last: whether it holds the head.
    """

    pp: int
    vp: int
    layers: range
    last: bool


def _pipeline_stages(counts: Sequence[Sequence[int]]) -> list[Stage]:
    """Return the pipeline's chunks, of ``counts[vp][pp]`` layers, in the order of the network."""
    pipeline: list[Stage] = []
    start, chunks = 0, sum(len(of_pp) for of_pp in counts)
    for vp, of_pp in enumerate(counts):
        for pp, count in enumerate(of_pp):
            layers = range(start, start + count)
            pipeline.append(Stage(pp, vp, layers, len(pipeline) == chunks - 1))
            start += count
    return pipeline


def _rows_by_stage(
    rows: Iterable[Row], pipeline: Sequence[Stage], *, tied: bool
) -> list[list[Row]]:
    """Return the rows of each chunk.

    If the embedding is tied and the last chunk does not hold it, Megatron gives that chunk a copy
    as its output layer. The table has no row for the copy, so one is added here.
    """
    first, last = pipeline[0], pipeline[-1]
    shares: dict[Stage, list[Row]] = {stage: [] for stage in pipeline}
    of_layer = {layer: stage for stage in pipeline for layer in stage.layers}
    for row in rows:
        if row.layer is not None:
            if row.layer in of_layer:
                shares[of_layer[row.layer]].append(row)
            continue
        shares[last if row.key in (OUTPUT, FINAL_NORM) else first].append(row)
        if tied and row.key == EMBEDDING and first != last:
            shares[last].append(replace(row, key=OUTPUT))
    return list(shares.values())


def _model_key(vp: int, vpp: int) -> str:
    """Return the key under which a rank's file has the state of virtual stage `vp`."""
    return f"model{vp}" if vpp > 1 else "model"


def _local_name(row: Row, stage: Stage, experts: int, spec: Spec) -> str:
    """Return the parameter's name on a rank that holds `experts` experts of a layer."""
    layer, expert = row.layer, row.expert
    if layer is None:
        return row.key
    part = re.sub(r"^\d+\.", "", row.key.removeprefix(_LAYERS))
    if expert is not None:
        linear = part.removeprefix("mlp.experts.experts.")  # linear_fc1.weight
        number = expert % experts
        grouped = spec == "te"
        part = f"mlp.experts.{linear}{number}" if grouped else f"{_SEQUENTIAL}{number}.{linear}"
    elif spec == "torch":
        part = _STANDALONE_NORMS.get(part, part)
    return f"{_LAYERS}{layer - stage.layers.start}.{part}"


def _extra_state_names(row: Row, name: str, spec: Spec) -> Iterator[str]:
    """Yield the names of the ``_extra_state`` that ``state_dict()`` has beside parameter `name`.

    Linear layers and standalone norms have one (FP8 scales; None or empty without FP8). So have
    mcore's own linear layers in the torch spec, which keep a place for it.
    """
    if not name.startswith(_LAYERS) and name not in (OUTPUT, FINAL_NORM):
        return
    if not row.key.endswith(".weight") or ".router." in name:
        return  # a fused norm, or the standalone norm that replaces it in the torch spec
    yield f"{name.rpartition('.')[0]}._extra_state"
    if spec == "te" and name.endswith("linear_proj.weight"):
        yield name.replace("linear_proj.weight", "core_attention._extra_state")


def _rank_boxes(row: Row, shape: Shape, index: int, size: int) -> list[Box]:
    """Return the boxes of one TP rank's part of a row's piece, in order along the TP axis."""
    full = tuple(slice(0, n) for n in shape)
    axis = row.tp_axis
    if axis is None or axis >= len(shape):
        return [full]
    part = shape[axis] // row.tp_parts
    width = part // size
    starts = (number * part + index * width for number in range(row.tp_parts))
    return [(*full[:axis], slice(at, at + width), *full[axis + 1 :]) for at in starts]


@dataclass(frozen=True)
class _LocalTensor:
    """One parameter of one rank: boxes of a row's piece, one after another."""

    name: str
    row: Row
    boxes: list[Box]
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


_Models = list[tuple[Stage, list[_LocalTensor]]]


@dataclass(frozen=True)
class ToLegacy:
    """A conversion to the legacy format; see `engine.Conversion`."""

    mcore: ToMcore  # the torch_dist conversion of the same source
    rows: list[Row]
    layout: Layout  # CP, DP and SP do not matter
    spec: Spec  # whose parameter names are written
    args: dict[str, Any]  # the arguments that Megatron's loader reads

    def prepare(self, tree: Path) -> None:
        self.mcore.prepare(tree)

    def file(self, unit: Unit, tree: Path) -> Path | None:
        return (
            tree / RELEASE / unit.name / FILE
            if isinstance(unit.work[0], ModelParallelRank)
            else None
        )

    def run_unit(self, unit: Unit, tree: Path, advance: Callable[[int, str], None]) -> Any:
        file = self.file(unit, tree)
        if file is None:
            # Ranks read parts of tensors, some repeatedly; a checksum needs one whole pass.
            readers = self.mcore.readers(unit)
            for reader in readers:
                for _ in reader.chunks():
                    pass
            return to_mcore.unit_result(readers)
        file.parent.mkdir(exist_ok=True)
        models = list(self.models(unit.work[0]))
        with DirectFile(file, create=True) as out:
            write_archive(out, self._state_dict_content(models), self._storages(models, advance))
            out.sync()
        return {"size": file.stat().st_size}

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        self.mcore.write_files_beside(tree, results)

    def models(self, rank: ModelParallelRank) -> Iterator[tuple[Stage, list[_LocalTensor]]]:
        """Yield the rank's pipeline chunks with their parameters, in the order of the network."""
        for stage, rows in self._pipeline:
            if stage.pp == rank.pp:
                yield stage, list(self._local_tensors(stage, rows, rank))

    @cached_property
    def _pipeline(self) -> list[tuple[Stage, list[Row]]]:
        a, layout = self.mcore.architecture, self.layout
        counts = [len(layers) for layers in layout.virtual_stages(a.num_hidden_layers)]
        pipeline = _pipeline_stages(
            [list(counts) for counts in itertools.batched(counts, layout.pp)]
        )
        shares = _rows_by_stage(self.rows, pipeline, tied=a.tie_word_embeddings)
        return list(zip(pipeline, shares, strict=True))

    def _local_tensors(
        self, stage: Stage, rows: list[Row], rank: ModelParallelRank
    ) -> Iterator[_LocalTensor]:
        """Yield the rank's parameters of one pipeline chunk, without other ranks' experts."""
        layout = self.layout
        experts = self.mcore.architecture.num_experts // layout.ep
        for row in rows:
            expert = row.expert
            if expert is not None and expert // experts != rank.ep:
                continue
            name = _local_name(row, stage, experts, self.spec)
            index, size = rank.share(row, layout)
            dtype = self.mcore.tensors.get(row.key, self.mcore.tensors[EMBEDDING]).dtype
            places = _rank_boxes(row, row.shape, index, size)
            shape = tuple(n // size if i == row.tp_axis else n for i, n in enumerate(row.shape))
            yield _LocalTensor(name, row, places, shape, dtype)

    def _state_dict_content(self, models: _Models) -> dict[str, Any]:
        """Return what ``megatron.training.checkpointing.generate_state_dict`` would make."""
        content: dict[str, Any] = {"args": Namespace(**self.args)}
        content |= {"checkpoint_version": 3.0, "iteration": 0}
        # Numbered in the order in which `_storages` yields them.
        numbers = itertools.count()
        for stage, tensors in models:
            state: OrderedDict[str, Any] = OrderedDict()
            for tensor in tensors:
                state[tensor.name] = Described(tensor.dtype, tensor.shape, next(numbers))
                state |= dict.fromkeys(_extra_state_names(tensor.row, tensor.name, self.spec))
            if stage.last:
                state["output_layer._extra_state"] = None
            content[_model_key(stage.vp, self.layout.vpp)] = state
        return content

    def _storages(
        self, models: _Models, advance: Callable[[int, str], None]
    ) -> Iterator[tuple[int, Iterator[Tensor]]]:
        """Yield the bytes and the chunks of each tensor; report it once its chunks are written."""
        for _, tensors in models:
            for tensor in tensors:
                yield tensor.nbytes, self._stream_values(tensor)
                advance(tensor.nbytes, tensor.name)

    def _stream_values(self, tensor: _LocalTensor) -> Iterator[Tensor]:
        """Yield the tensor's values in order, in chunks; views of the source where possible."""
        row, source = tensor.row, self.mcore.source

        def fetch(name: str, box: Selection) -> Tensor:
            return source.read_tensor(name, box, tensor.dtype)

        step = max_rows(row, tensor.dtype)
        for rows, *columns in tensor.boxes:
            for start in range(rows.start, rows.stop, step):
                yield row.take(fetch, (slice(start, min(start + step, rows.stop)), *columns))


def plan(source: Path, layout: Layout, spec: Spec, **options: Any) -> ConversionPlan:
    """Check an HF checkpoint and plan its conversion; `options` are those of `to_mcore.plan`.

    Raises:
        BadInput: the layout does not divide the model, the format cannot hold such a layout, `spec`
            is unknown, or `to_mcore.plan` raised it.
    """
    if spec not in get_args(Spec):
        raise BadInput(f"layer spec {spec!r} is not one of {', '.join(get_args(Spec))}.")
    _require_equal_parts(Architecture.from_hf(source))
    same = to_mcore.plan(source, **options, tp=layout.tp)
    base = same.conversion
    assert isinstance(base, ToMcore)
    layout = layout if base.architecture.is_moe else replace(layout, etp=1)
    rows = [row for unit in same.units for row in unit.work]
    _check_layout(layout, base, rows)
    divisor = options.get("make_vocab_size_divisible_by", 1)
    conversion = ToLegacy(base, rows, layout, spec, _loader_arguments(layout, spec, base, divisor))
    files = []
    for rank in _ranks_with_files(layout):
        nbytes = sum(tensor.nbytes for _, tensors in conversion.models(rank) for tensor in tensors)
        files.append(Unit(rank.folder_name(layout), nbytes, (rank,)))
    checksums = [Unit(f"checksums {unit.name}", 0, unit.work) for unit in same.units]
    return replace(
        same,
        units=(*files, *checksums),
        identity={**same.identity, "layout": str(layout), "spec": spec},
        conversion=conversion,
        files=len(files),
        notes=(*same.notes, f"For layout {layout} and layer spec {spec} only."),
    )


def _check_layout(layout: Layout, mcore: ToMcore, rows: list[Row]) -> None:
    """Raise BadInput if the layout does not fit the model or the format."""
    a = mcore.architecture
    if not mcore.source.form.head.is_language_model:
        raise BadInput(
            f"{mcore.source.path} has no language model's head, and Megatron loads the legacy "
            "format only with one: choose --format torch_dist."
        )
    if min(layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp) < 1:
        raise BadInput(f"{layout}: parallel sizes start at 1.")
    if a.is_moe and layout.tp % layout.etp:
        raise BadInput(
            f"The names of legacy files tell TP, PP and EP ranks apart, but not those of ETP "
            f"{layout.etp} under TP {layout.tp}: choose an ETP that divides TP, or --format "
            "torch_dist, which loads under any layout."
        )
    together = lcm(layout.tp, layout.etp * layout.ep)
    enough = replace(layout, cp=1, dp=together // layout.tp, sp=layout.tp > 1)
    padded = mcore.tensors[EMBEDDING].shape[0]
    enough.validate(replace(a, vocab_size=padded))
    for row in rows:
        size = layout.tp if row.expert is None else layout.etp
        if row.tp_axis is not None and row.shape[row.tp_axis] % (size * row.tp_parts):
            raise BadInput(
                f"{row.key} {list(row.shape)} cannot be cut into {size} equal parts along axis "
                f"{row.tp_axis}: choose another TP."
            )


def _loader_arguments(layout: Layout, spec: Spec, mcore: ToMcore, divisor: int) -> dict[str, Any]:
    """Return the arguments that Megatron's loader compares with, or takes from, a checkpoint."""
    a = mcore.architecture
    dtype = mcore.tensors[EMBEDDING].dtype
    return {
        **architecture_arguments(a),
        "add_position_embedding": True,  # Megatron's default; mrope does not change it
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tokenizer_type": "NullTokenizer",
        "make_vocab_size_divisible_by": divisor,
        "padded_vocab_size": mcore.tensors[EMBEDDING].shape[0],
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": layout.first,
        "decoder_last_pipeline_num_layers": layout.last,
        "pipeline_model_parallel_layout": layout.split,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "spec": [spec],
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        "moe_grouped_gemm": any(a.moe_layers),
        "data_parallel_random_init": False,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch",
    }


FORMAT = CheckpointFormat(
    name="torch",
    title="Megatron's legacy format",
    open=LegacyCheckpoint,
    plan=plan,
    check_run=check_run,
)
