"""Inspect a path: the kind of checkpoint, its model, size and tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.form_file import read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint, is_huggingface
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.dialects import recognise
from mcore_qwen3vl.converters.mapping.forms import Form
from mcore_qwen3vl.converters.mapping.row import Row, SourceTensor
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.converters.mcore.formats import (
    is_megatron,
    open_megatron,
    refuse_verl_huggingface,
)
from mcore_qwen3vl.converters.mcore.paths import hf_folder, iteration_folder
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it is stored: HF's name, or mcore's key (with layers stacked)."""

    name: str
    shape: Shape
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_path`.

    Attributes:
        kind: "huggingface", "megatron" or "config" (a config without weights).
        architecture: the model's shape.
        form: how its Hugging Face tensors are called, and which head it has.
        expert_layout: declared layout of the fused experts; None for a dense model.
        iteration: name of the iteration's folder in a Megatron checkpoint; else None.
        maker: who wrote a Megatron checkpoint in a dialect; else None.
        tensors: the stored tensors; for a config, the tensors that its weights would have.
        parameters: parameter count by part of the model, without vocabulary padding.
        active_parameters: parameters used for one token (top-k experts), all parts.
        padded_vocab_size: rows of the embedding in a Megatron checkpoint; else None.
        files: number of weight files.
        nbytes: bytes of tensor data.
    """

    path: str
    kind: str
    architecture: Architecture
    form: Form
    expert_layout: str | None
    iteration: str | None
    tensors: tuple[TensorInfo, ...]
    parameters: dict[str, int]
    active_parameters: int
    padded_vocab_size: int | None
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
        rows = table(
            self.architecture, padded_vocab_size=self.padded_vocab_size, head=self.form.head
        )
        return [replace(row, sources=tuple(map(self._stored, row.sources))) for row in rows]

    def _stored(self, source: SourceTensor) -> SourceTensor:
        return replace(source, name=self.form.names.stored(source.name))


def inspect_path(path: str | Path, *, hf_config: str | Path | None = None) -> Inspection:
    """Inspect an HF checkpoint, an mcore checkpoint, or a ``config.json`` (file or directory).

    Args:
        hf_config: directory of the config of an mcore checkpoint that has none.

    Raises:
        BadInput: the path is none of these, or is damaged, or is a folder of VERL's above the
            Hugging Face weights that it holds.
    """
    path = Path(path)
    refuse_verl_huggingface(path)
    if is_megatron(path):
        return _megatron(path, None if hf_config is None else Path(hf_config))
    if hf_config is not None:
        raise BadInput(f"{path} is no Megatron-Core checkpoint: --hf-config is not for it.")
    if is_huggingface(path):
        return _huggingface(path)
    if path.is_file() or (path / "config.json").is_file():
        return _config(path)
    raise BadInput(
        f"{path} is neither a Hugging Face checkpoint, nor a Megatron-Core one, nor a config.json."
    )


def _megatron(path: Path, hf_config: Path | None) -> Inspection:
    try:
        folder = hf_config or hf_folder(path)
    except BadInput as error:
        if (maker := _maker(path)) is None:
            raise
        raise BadInput(f"Written by {maker}. {error}") from None
    architecture = Architecture.from_hf(folder)
    checkpoint = open_megatron(path, architecture)
    stored = {key: checkpoint.index.tensors[key] for key in sorted(checkpoint.model_keys())}
    tensors = tuple(
        _info(key, t.shape, dtype_name(t.dtype), t.dtype.itemsize) for key, t in stored.items()
    )
    found = _inspection(
        path,
        "megatron",
        architecture,
        read_form(folder),
        tensors,
        iteration=checkpoint.folder.name,
        padded_vocab_size=checkpoint.vocab_size,
        files=len(checkpoint.data_files),
    )
    return found if checkpoint.dialect is None else replace(found, maker=checkpoint.dialect.maker)


def _maker(path: Path) -> str | None:
    """Return which other project wrote a torch_dist checkpoint, by the keys of its index."""
    folder = iteration_folder(path)
    if not (folder / metadata.FILE).is_file():
        return None
    dialect = recognise(metadata.read(folder).tensors)
    return None if dialect is None else dialect.maker


def _huggingface(path: Path) -> Inspection:
    checkpoint = HuggingFaceCheckpoint(path)
    tensors = tuple(
        _info(checkpoint.form.names.stored(name), e.shape, dtype_name(e.stored), e.stored.itemsize)
        for name, e in (checkpoint.entries | checkpoint.scales).items()
    )
    return _inspection(
        path,
        "huggingface",
        Architecture.from_hf(path),
        checkpoint.form,
        tensors,
        files=len(checkpoint.files),
    )


def _config(path: Path) -> Inspection:
    architecture = Architecture.from_hf(path)
    shapes = hf_shapes(table(architecture))
    itemsize = {"float32": 4}.get(architecture.dtype, 2)
    tensors = tuple(_info(n, s, architecture.dtype, itemsize) for n, s in shapes.items())
    return _inspection(path, "config", architecture, Form(), tensors, files=0)


def _inspection(
    path: Path,
    kind: str,
    architecture: Architecture,
    form: Form,
    tensors: tuple[TensorInfo, ...],
    *,
    files: int,
    iteration: str | None = None,
    padded_vocab_size: int | None = None,
) -> Inspection:
    return Inspection(
        path=str(path),
        kind=kind,
        architecture=architecture,
        form=form,
        expert_layout=architecture.expert_layout,
        iteration=iteration,
        tensors=tensors,
        parameters=dict(parameters.by_part(architecture, form.head)),
        active_parameters=parameters.active(architecture, form.head),
        padded_vocab_size=padded_vocab_size,
        files=files,
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


def _info(name: str, shape: Shape, dtype: str, itemsize: int) -> TensorInfo:
    return TensorInfo(name, shape, dtype, prod(shape) * itemsize)
