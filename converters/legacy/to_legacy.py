"""Hugging Face to Megatron's legacy format: the plan and its units. Each unit is one rank's file.

Further units compute the manifest's checksums.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import batched, count
from math import lcm, prod
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.legacy.legacy_checkpoint import (
    FILE,
    Rank,
    Spec,
    Stage,
    extra_state_names,
    local_name,
    model_key,
    pipeline_stages,
    rank_boxes,
    ranks_with_files,
    require_equal_parts,
    rows_by_stage,
)
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, Row, max_rows
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.converters.offline.engine import ConversionPlan, Unit
from mcore_qwen3vl.converters.offline.to_mcore import ToMcore
from mcore_qwen3vl.converters.place import RELEASE
from mcore_qwen3vl.converters.storage.archive import Described, write_archive
from mcore_qwen3vl.converters.storage.boxes import Box, Selection, Shape
from mcore_qwen3vl.converters.storage.disk import DirectFile
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.megatron_config import architecture_arguments


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
        return tree / RELEASE / unit.name / FILE if isinstance(unit.work[0], Rank) else None

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

    def models(self, rank: Rank) -> Iterator[tuple[Stage, list[_LocalTensor]]]:
        """Yield the rank's pipeline chunks with their parameters, in the order of the network."""
        for stage, rows in self._pipeline:
            if stage.pp == rank.pp:
                yield stage, list(self._local_tensors(stage, rows, rank))

    @cached_property
    def _pipeline(self) -> list[tuple[Stage, list[Row]]]:
        a, layout = self.mcore.architecture, self.layout
        counts = [len(layers) for layers in layout.virtual_stages(a.num_hidden_layers)]
        pipeline = pipeline_stages([list(counts) for counts in batched(counts, layout.pp)])
        shares = rows_by_stage(self.rows, pipeline, tied=a.tie_word_embeddings)
        return list(zip(pipeline, shares, strict=True))

    def _local_tensors(self, stage: Stage, rows: list[Row], rank: Rank) -> Iterator[_LocalTensor]:
        """Yield the rank's parameters of one pipeline chunk, without other ranks' experts."""
        layout = self.layout
        experts = self.mcore.architecture.num_experts // layout.ep
        for row in rows:
            expert = row.expert
            if expert is not None and expert // experts != rank.ep:
                continue
            name = local_name(row, stage, experts, self.spec)
            index, size = rank.share(row, layout)
            dtype = self.mcore.tensors.get(row.key, self.mcore.tensors[EMBEDDING]).dtype
            places = rank_boxes(row, row.shape, index, size)
            shape = tuple(n // size if i == row.tp_axis else n for i, n in enumerate(row.shape))
            yield _LocalTensor(name, row, places, shape, dtype)

    def _state_dict_content(self, models: _Models) -> dict[str, Any]:
        """Return what ``megatron.training.checkpointing.generate_state_dict`` would make."""
        content: dict[str, Any] = {"args": Namespace(**self.args)}
        content |= {"checkpoint_version": 3.0, "iteration": 0}
        # Numbered in the order in which `_storages` yields them.
        numbers = count()
        for stage, tensors in models:
            state: OrderedDict[str, Any] = OrderedDict()
            for tensor in tensors:
                state[tensor.name] = Described(tensor.dtype, tensor.shape, next(numbers))
                state |= dict.fromkeys(extra_state_names(tensor.row, tensor.name, self.spec))
            if stage.last:
                state["output_layer._extra_state"] = None
            content[model_key(stage.vp, self.layout.vpp)] = state
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
    require_equal_parts(Architecture.from_hf(source))
    same = to_mcore.plan(source, **options, tp=layout.tp)
    base = same.conversion
    assert isinstance(base, ToMcore)
    layout = layout if base.architecture.is_moe else replace(layout, etp=1)
    rows = [row for unit in same.units for row in unit.work]
    _check_layout(layout, base, rows)
    divisor = options.get("make_vocab_size_divisible_by", 1)
    conversion = ToLegacy(base, rows, layout, spec, _loader_arguments(layout, spec, base, divisor))
    files = []
    for rank in ranks_with_files(layout):
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
