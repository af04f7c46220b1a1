"""Inspect a path (its kind, model, tensors and mapping), and estimate the cost of a conversion.

Of a LoRA adapter: what it adapts, how large it is, whether it fits a model, and what vLLM would not
serve.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, AdapterFile, Roles, read_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.formats import open_megatron
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import CheckpointPlace, PathKind, identify
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.dialects import dialect_of
from mcore_qwen3vl.converters.mapping.forms import Form
from mcore_qwen3vl.converters.mapping.rearrangement import Rearrangement
from mcore_qwen3vl.converters.mapping.table import (
    Row,
    SourceTensor,
    hf_shapes,
    max_rows,
    split_experts,
    table,
)
from mcore_qwen3vl.converters.offline.engine import default_workers, group_units, unit_bytes
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.errors import BadInput

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it is stored: HF's name, or mcore's key (with layers stacked)."""

    name: str
    shape: Shape
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of `inspect_path`.

    Attributes:
        kind: "huggingface", "megatron" or "config" (a config without weights).
        config: the folder of its config, or that file.
        expert_layout: declared layout of the fused experts; None for a dense model.
        iteration: name of the iteration's folder in a Megatron checkpoint; else None.
        maker: who wrote a Megatron checkpoint in a dialect; else None.
        tensors: the stored tensors; for a config, the tensors that its weights would have.
        parameters: parameter count by part of the model, without vocabulary padding.
        active_parameters: parameters used for one token (top-k experts), all parts.
        padded_vocab_size: rows of the embedding in a Megatron checkpoint; else None.
        has_mtp: whether there are MTP layers.
    """

    path: str
    kind: str
    config: str
    architecture: Architecture
    form: Form
    expert_layout: str | None
    iteration: str | None = None
    tensors: tuple[TensorInfo, ...]
    parameters: dict[str, int]
    active_parameters: int
    padded_vocab_size: int | None = None
    has_mtp: bool
    files: int
    nbytes: int
    maker: str | None = None

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))

    def mapping(self) -> list[Row]:
        """Return the rows of the mapping, with this checkpoint's vocabulary padding and names."""
        padded, form = self.padded_vocab_size, self.form
        rows = split_experts(
            table(self.architecture, padded_vocab_size=padded, head=form.head, mtp=self.has_mtp),
            form.split_experts,
        )
        stored = form.names.stored_name
        named = ([replace(s, name=stored(s.written_name)) for s in row.sources] for row in rows)
        return [replace(row, sources=tuple(n)) for row, n in zip(rows, named, strict=True)]


def inspect_path(path: str | Path, *, hf_config: str | Path | None = None) -> Inspection:
    """Inspect an HF checkpoint, an mcore checkpoint, or a ``config.json`` (file or directory).

    Args:
        hf_config: directory of the config of an mcore checkpoint that has none.

    Raises:
        BadInput: the path is none of these, or is damaged, or holds the checkpoint in another
            folder, which the message names.
    """
    place = identify(path)
    if place.kind is not PathKind.CONFIG or place.path.is_dir():
        place.require_whole(or_config=True)
    if place.kind in (PathKind.MEGATRON, PathKind.UNKNOWN):
        return _inspect_megatron(place, None if hf_config is None else Path(hf_config))
    if hf_config is not None:
        raise BadInput(f"{path} is no Megatron-Core checkpoint: --hf-config is not for it.")
    return (_inspect_huggingface if place.kind is PathKind.HUGGINGFACE else _inspect_config)(
        place.path
    )


def _inspect_megatron(place: CheckpointPlace, hf_config: Path | None) -> Inspection:
    """Inspect a Megatron checkpoint; without a config, the error says whose checkpoint it is."""
    try:
        folder = hf_config or place.config()
    except BadInput as error:
        newest = place.weights()
        keys = read_metadata(newest).tensors if (newest / METADATA).is_file() else ()
        if (dialect := dialect_of(newest, keys)) is None:
            raise
        raise BadInput(f"Written by {dialect.maker}. {error}") from None
    architecture = Architecture.from_hf(folder)
    checkpoint = open_megatron(place, architecture)
    stored = ((key, checkpoint.index.tensors[key]) for key in sorted(checkpoint.model_keys()))
    tensors = tuple(_tensor_info(key, t.shape, t.dtype) for key, t in stored)
    return _make_inspection(
        place.path,
        architecture,
        read_form(folder),
        tensors,
        config=str(folder),
        kind="megatron",
        maker=None if checkpoint.dialect is None else checkpoint.dialect.maker,
        iteration=checkpoint.folder.name,
        padded_vocab_size=checkpoint.vocab_size,
        has_mtp=checkpoint.has_mtp,
        files=len(checkpoint.data_files),
    )


def _inspect_huggingface(path: Path) -> Inspection:
    checkpoint = HuggingFaceCheckpoint(path)
    tensors = tuple(
        _tensor_info(checkpoint.form.names.stored_name(name), entry.shape, entry.stored)
        for name, entry in (checkpoint.headers | checkpoint.scales).items()
    )
    facts: dict[str, Any] = {"kind": "huggingface", "files": len(checkpoint.files)}
    facts["has_mtp"] = checkpoint.has_mtp
    return _make_inspection(path, Architecture.from_hf(path), checkpoint.form, tensors, **facts)


def _inspect_config(path: Path) -> Inspection:
    """Inspect a config; the tensors are those that its weights would have."""
    architecture = Architecture.from_hf(path)
    dtype, itemsize = architecture.dtype, {"float32": 4}.get(architecture.dtype, 2)
    has_mtp = architecture.mtp_num_hidden_layers > 0
    shapes = hf_shapes(table(architecture, mtp=has_mtp))
    tensors = tuple(TensorInfo(n, s, dtype, prod(s) * itemsize) for n, s in shapes.items())
    facts: dict[str, Any] = {"kind": "config", "files": 0, "has_mtp": has_mtp}
    return _make_inspection(path, architecture, Form(), tensors, **facts)


def _make_inspection(
    path: Path,
    architecture: Architecture,
    form: Form,
    tensors: tuple[TensorInfo, ...],
    *,
    has_mtp: bool,
    config: str | None = None,
    **facts: Any,
) -> Inspection:
    return Inspection(
        path=str(path),
        config=config or str(path),
        architecture=architecture,
        form=form,
        expert_layout=architecture.expert_layout,
        tensors=tensors,
        has_mtp=has_mtp,
        parameters=dict(parameters.count_by_kind(architecture, form.head, mtp=has_mtp)),
        active_parameters=parameters.active(architecture, form.head),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        **facts,
    )


def _tensor_info(name: str, shape: Shape, dtype: torch.dtype) -> TensorInfo:
    return TensorInfo(name, shape, dtype_name(dtype), prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class MappingLine:
    """Rows of the mapping that differ only in the layer, block or expert.

    Attributes:
        hf: names of the Hugging Face tensors that make one mcore piece, in the order of the
            transform; ``layers.{0..35}`` stands for each of these layers.
        hf_shapes: shape of each whole HF tensor (fused experts with their first axis).
        mcore: sharded checkpoint key of the mcore tensor, written in the same way.
        shape: shape of one piece: one layer, or one expert.
        stacked: sizes of the axes before `shape`: (layers,), (experts,), (layers, experts) or ().
        tp_axis, tp_parts: see `table.Row`.
        cut_by: ``TP``, or ``ETP`` for an expert; None where `tp_axis` is None.
    """

    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    mcore: str
    shape: Shape
    stacked: Shape
    transform: str
    tp_axis: int | None
    tp_parts: int
    cut_by: str | None
    rows: int


def mapping_lines(rows: Iterable[Row]) -> list[MappingLine]:
    """Fold the rows of :func:`mcore_qwen3vl.converters.mapping.table.table`, in order."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        names = (row.key, *(source.name for source in row.sources))
        shapes = (row.global_shape, *(source.shape for source in row.sources))
        parts = (source.piece for source in row.sources if source.index is None)
        alike = (*(_NUMBER.sub("#", n) for n in names), *shapes, *parts, row.rearrangement)
        groups.setdefault((*alike, row.tp_axis, row.tp_parts), []).append(row)
    lines = []
    for group in groups.values():
        first = group[0]
        sources = zip(*(map(_source_name, row.sources) for row in group), strict=True)
        cut_by = "ETP" if ".experts." in first.key else "TP"
        line = MappingLine(
            hf=tuple(map(_fold_names, sources)),
            hf_shapes=tuple(source.written_shape for source in first.sources),
            mcore=_fold_names([row.key for row in group]),
            shape=first.shape,
            stacked=first.global_shape[: len(first.offset)],
            transform=transform_name(first.rearrangement),
            tp_axis=first.tp_axis,
            tp_parts=first.tp_parts,
            cut_by=None if first.tp_axis is None else cut_by,
            rows=len(group),
        )
        lines.append(line)
    return lines


def transform_name(rearrangement: Rearrangement) -> str:
    """Return the name of the transform, in a few words."""
    if rearrangement.transposed:
        return "transpose"
    if rearrangement.padding:
        return f"append {rearrangement.padding} zero rows"
    if rearrangement.source_count == 1:
        return "identity"
    if len(rearrangement.blocks) == rearrangement.source_count:
        return "concatenate rows"
    last = rearrangement.source_count - 1  # each group has one block of it
    groups = sum(block.source == last for block in rearrangement.blocks)
    return f"interleave rows in {groups} groups"


def _source_name(source: SourceTensor) -> str:
    """Return the name, with the rows if the piece is a part of the tensor of that name."""
    if source.rows is None or source.alone:
        return source.name
    return f"{source.name}[{source.rows[0]}:{source.rows[1]}]"


def _fold_names(names: Sequence[str]) -> str:
    """Return one name for all `names`, with the several numbers of a place in braces."""
    places = [set(map(int, place)) for place in zip(*map(_NUMBER.findall, names), strict=True)]
    shown = iter(f"{{{_ranges(sorted(n))}}}" if len(n) > 1 else str(*n) for n in places)
    return _NUMBER.sub(lambda _: next(shown), names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0..3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


BASE_BYTES = 2**30
"""Bytes that the process may use besides its workers' slices."""


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a conversion in either direction.

    Attributes:
        pieces: rows of the mapping table: one layer of a tensor, one expert of one layer.
        units: number of units of work. A finished unit is journalled, so that a later run does not
            repeat it.
        nbytes: bytes of tensor data, read once and written once.
        largest_slice: mcore key of the piece with the most bytes in a worker at a time.
        largest_slice_bytes: the bytes of that piece that a worker holds at a time.
        memory_bound_bytes: 1 GiB plus one such slice for each worker, without the page cache.
        seconds: time to read and write everything at `disk_gb_per_s` (10^9 bytes); None if that is
            None.
    """

    model: str
    dtype: str
    tensors: int
    pieces: int
    units: int
    nbytes: int
    largest_slice: str
    largest_slice_bytes: int
    workers: int
    memory_bound_bytes: int
    disk_gb_per_s: float | None
    seconds: float | None


def estimate(
    config: str | Path, *, workers: int | None = None, disk_gb_per_s: float | None = None
) -> Estimate:
    """Estimate the conversion of the model that a ``config.json``, or its directory, describes.

    Raises:
        BadInput: the config does not describe a Qwen3-VL model, or an option is not positive.
    """
    if (workers is not None and workers < 1) or not (disk_gb_per_s is None or disk_gb_per_s > 0):
        raise BadInput("--workers and --disk-gb-per-s must be positive.")
    architecture = Architecture.from_hf(config)
    rows = table(architecture, mtp=architecture.mtp_num_hidden_layers > 0)
    dtype = torch.float32 if architecture.dtype == "float32" else torch.bfloat16
    work = [(row, row.numel * dtype.itemsize) for row in rows]
    nbytes = sum(size for _, size in work)
    largest = max(rows, key=lambda row: slice_bytes(row, dtype))
    workers = workers or default_workers()
    return Estimate(
        model=architecture.kind,
        dtype=architecture.dtype,
        tensors=len(hf_shapes(rows)),
        pieces=len(rows),
        units=sum(1 for _ in group_units(work, unit_bytes(nbytes), str)),
        nbytes=nbytes,
        largest_slice=largest.key,
        largest_slice_bytes=slice_bytes(largest, dtype),
        workers=workers,
        memory_bound_bytes=BASE_BYTES + workers * slice_bytes(largest, dtype),
        disk_gb_per_s=disk_gb_per_s,
        seconds=None if disk_gb_per_s is None else 2 * nbytes / 1e9 / disk_gb_per_s,
    )


def slice_bytes(row: Row, dtype: torch.dtype) -> int:
    """Return the most bytes of one row that a worker holds at a time, in either direction."""
    height = min(max_rows(row, dtype), row.shape[0])
    if not row.rearrangement.in_order:  # read whole, for the checksums
        height = row.shape[0]
    return height * prod(row.shape[1:]) * dtype.itemsize


@dataclass(frozen=True)
class AdapterPart:
    """Parameters with the same rank, scaling and shapes whose names differ only in numbers.

    In `name`, ``*`` stands for a number; it is PEFT's key if the model is not known. `r` and
    `scaling` are those of `Factors`; None for a tensor that is stored whole or of an unknown model.
    """

    name: str
    count: int
    r: int | None
    scaling: float | None
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class AdapterInspection:
    """The result of `inspect_adapter`.

    Attributes:
        base: directory of the model that the adapter was checked against; None if it was not
            checked.
        roles: of the factors of fused experts; None without these or without a model.
        parts: the adapted parameters and those stored whole.
        notes: notes of the reader (see `Adapter`), and what vLLM would not serve.
    """

    path: str
    kind: str
    base: str | None
    config: dict[str, Any]
    roles: str | None
    parts: tuple[AdapterPart, ...]
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    nbytes: int
    notes: tuple[str, ...]


def inspect_adapter(path: str | Path, hf_config: str | Path | None = None) -> AdapterInspection:
    """Inspect a PEFT adapter directory, and check it against its model if that is known.

    Args:
        hf_config: directory of the model's ``config.json``; default: the base that the adapter's
            config names, if it is a local directory.

    Raises:
        BadInput: the adapter is damaged, or does not fit the model.
    """
    path = Path(path)
    config = AdapterConfig.from_file(path)
    base = base_directory(config, hf_config)
    file = AdapterFile(path)
    roles: Roles | None = None
    notes: tuple[str, ...] = ()
    if base is None:
        keys = Counter((_with_stars(key), shape) for key, shape in file.shapes.items())
        parts = [AdapterPart(key, n, None, None, (shape,)) for (key, shape), n in keys.items()]
    else:
        adapter = read_adapter(path, base)
        parts = _adapter_parts(adapter)
        architecture = Architecture.from_hf(base)
        notes = (*adapter.notes, *vllm_notes(adapter, architecture))
        if any(".mlp.experts." in name for name in adapter.factors):
            roles = adapter.roles
    sizes = {key: prod(shape) for key, shape in file.shapes.items()}
    return AdapterInspection(
        path=str(path),
        kind="adapter",
        base=None if base is None else str(base),
        config=config.to_dict(),
        roles=roles,
        parts=tuple(parts),
        tensors=len(sizes),
        parameters=sum(sizes.values()),
        dtypes=tuple(sorted({dtype_name(dtype) for dtype in file.dtypes.values()})),
        nbytes=sum(size * file.dtypes[key].itemsize for key, size in sizes.items()),
        notes=notes,
    )


def base_directory(config: AdapterConfig, hf_config: str | Path | None) -> Path | None:
    """Return `hf_config`, or else the base named by the adapter, if it is a local directory."""
    if hf_config is not None:
        return Path(hf_config)
    named = config.raw.get("base_model_name_or_path")
    if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
        return None
    return Path(named)


def require_base(config: AdapterConfig, hf_config: str | Path | None) -> Path:
    """Return the directory that `base_directory` finds; raise BadInput if there is none."""
    if (base := base_directory(config, hf_config)) is None:
        named = config.raw.get("base_model_name_or_path")
        raise BadInput(
            f"the adapter's base model ({named!r:.100}) was not found, and its shapes are needed: "
            "pass the directory of its config.json, or a hub id, as --hf-config."
        )
    return base


def _adapter_parts(adapter: Adapter) -> list[AdapterPart]:
    """Group parameters that differ only in numbers of their names."""
    alike: Counter[tuple[str, int | None, float | None, tuple[Shape, ...]]] = Counter()
    for name, f in adapter.factors.items():
        alike[_with_stars(name), f.r, f.scaling, (tuple(f.a.shape), tuple(f.b.shape))] += 1
    for name, tensor in adapter.saved.items():
        alike[f"{_with_stars(name)} (whole)", None, None, (tuple(tensor.shape),)] += 1
    return [AdapterPart(name, n, r, s, shapes) for (name, r, s, shapes), n in alike.items()]


def _with_stars(name: str) -> str:
    """Return `name` with ``*`` for each number between dots."""
    return re.sub(r"\.\d+\.", ".*.", name)


DEFAULT_RANK = 16
RANKS = (1, 8, DEFAULT_RANK, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's ``--max-lora-rank`` accepts."""


def vllm_notes(
    adapter: Adapter, architecture: Architecture, roles: Roles | None = None
) -> tuple[str, ...]:
    """Return one sentence for each reason why vLLM would not serve the adapter as it is.

    The rules come from vLLM 0.33's sources: ``vllm/lora/peft_helper.py``, ``lora_model.py``,
    ``model_manager.py`` and ``vllm/config/lora.py``. ``tests/vllm/test_lora.py`` checks them with
    vLLM 0.32 on the CPU, except for those on models with experts, which vLLM does not adapt there.

    Args:
        roles: roles of its factors in the file; default: the roles that it was read with.
    """
    notes = []
    rank = max((factors.r for factors in adapter.factors.values()), default=0)
    if rank > RANKS[-1]:
        notes.append(
            f"vLLM refuses the adapter: its largest rank is {rank}, more than {RANKS[-1]}."
        )
    elif rank > DEFAULT_RANK:
        enough = min(size for size in RANKS if size >= rank)
        notes.append(
            f"vLLM needs max_lora_rank {enough} for rank {rank}; its default is {DEFAULT_RANK}."
        )
    if adapter.config.modules_to_save:
        notes.append("vLLM refuses adapters with modules_to_save: merge the adapter.")
    experts = {name.rpartition(".")[2] for name in adapter.factors if ".mlp.experts." in name}
    if len(experts) == 1:
        notes.append(
            f"vLLM refuses the adapter: in the fused experts it adapts only {min(experts)}, and "
            "vLLM needs gate_up_proj and down_proj together, or neither: merge the adapter."
        )
    if experts and (roles or adapter.roles) == "swapped":
        notes.append(
            "vLLM reads the factors of fused experts only in the canonical roles: convert the "
            "adapter with `mcore-qwen3vl lora convert --roles canonical`."
        )
    tower = [name for name in adapter.factors if name.startswith("model.visual.")]
    if tower:
        notes.append(
            f"vLLM ignores the {len(tower)} adapted parameters of vision tower and mergers "
            "unless enable_tower_connector_lora is set."
        )
    if architecture.is_moe and any(name.endswith("attn.qkv.weight") for name in tower):
        notes.append(
            "Even with enable_tower_connector_lora, vLLM ignores attn.qkv in the vision tower of a "
            "MoE model: merge the adapter."
        )
    return tuple(notes)
