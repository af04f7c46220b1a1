"""Inspect a path: its kind, model, tensors and mapping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.formats import open_megatron
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import CheckpointPlace, PathKind, identify
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.dialects import dialect_of
from mcore_qwen3vl.converters.mapping.forms import Form
from mcore_qwen3vl.converters.mapping.table import Row, hf_shapes, split_experts, table
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.errors import BadInput


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
