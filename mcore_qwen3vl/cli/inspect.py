"""``mcore-qwen3vl inspect``: what a checkpoint, an adapter or a config is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.console import counted, dimensions, output, plain, size, table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import Unused
from mcore_qwen3vl.unused.fields import as_json as unused_as_json

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.adapters.inspection import AdapterInspection
    from mcore_qwen3vl.converters.cost import Estimate
    from mcore_qwen3vl.converters.describe import Inspection
    from mcore_qwen3vl.converters.mapping.lines import MappingLine

MAPPING_WIDTH = 260
"""The width at which no name of the mapping is folded, for pipes and files."""


def inspect(
    path: Annotated[
        Path | None,
        options.source(
            "PATH", "A checkpoint of either kind, a LoRA adapter, or a config.json; or a hub id."
        ),
    ] = None,
    hf_config: Annotated[
        Path | None,
        options.config(
            "Instead of PATH: estimate the cost of converting a model with this config. "
            "With an adapter as PATH: its base model. With a Megatron-Core checkpoint that has no "
            "hf folder: its config."
        ),
    ] = None,
    workers: options.Workers = None,
    disk_gb_per_s: Annotated[
        float | None, typer.Option(help="With --hf-config: disk speed, for the time estimate.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show which tensors are converted into which, and how.")
    ] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    json: options.Json = False,
) -> None:
    """Show what a checkpoint is: sizes, shapes, layout, dtype, parameter count by part."""
    from mcore_qwen3vl.converters.adapters.adapter import unused_of_adapter
    from mcore_qwen3vl.converters.adapters.inspection import inspect_adapter
    from mcore_qwen3vl.converters.cost import estimate
    from mcore_qwen3vl.converters.describe import inspect_path
    from mcore_qwen3vl.converters.identify import PathKind, identify
    from mcore_qwen3vl.converters.mapping.lines import mapping_lines
    from mcore_qwen3vl.unused.folder import unused_of

    place = None if path is None else identify(path)
    if place is not None and place.kind is PathKind.ADAPTER and not table:
        console.quiet_libraries()
        adapter = inspect_adapter(place.folder, hf_config)
        unused = unused_of_adapter(place.folder, adapter.base)
        _present_with_unused(json, asdict(adapter), unused, _show_adapter, adapter)
    elif path is None:
        if hf_config is None:
            raise BadInput("name one thing to inspect: PATH, or --hf-config DIR.")
        if table:
            raise BadInput("--table takes PATH, which may be a config.json, not --hf-config.")
        expected = estimate(hf_config, workers=workers, disk_gb_per_s=disk_gb_per_s)
        _present_with_unused(json, asdict(expected), unused_of(hf_config), _show_estimate, expected)
    elif table:
        inspection = inspect_path(path, hf_config=hf_config)
        lines = mapping_lines(inspection.mapping())
        named = {"path": inspection.path, "kind": inspection.kind}
        mapping = {**named, "mapping": [asdict(line) for line in lines]}
        console.present(json, mapping, _show_mapping, lines)
    else:
        inspection = inspect_path(path, hf_config=hf_config)
        total = {"total_parameters": inspection.total_parameters}
        facts = {**total, **asdict(inspection), "form": inspection.form.record}
        unused = unused_of(Path(inspection.config))
        _present_with_unused(json, facts, unused, _show_inspection, inspection, tensors)


def _present_with_unused(
    as_json: bool,
    facts: dict[str, Any],
    unused: Sequence[Unused],
    show: Callable[..., None],
    *shown: Any,
) -> None:
    """Show the facts, and what nothing uses of the files that they are from."""
    console.present(as_json, {**facts, "unused": unused_as_json(unused)}, show, *shown)
    if not as_json:
        console.print_unused(unused)


def _show_inspection(inspection: Inspection, tensors: bool) -> None:
    """Print what a path is, its parameters by part, and with `tensors` each of its tensors."""
    a = inspection.architecture
    kinds = {"huggingface": "Hugging Face checkpoint", "megatron": "Megatron-Core checkpoint"}
    facts = {
        "what": kinds.get(inspection.kind, "config without weights"),
        "model": f"{a.kind}, {a.num_hidden_layers} layers, "
        f"hidden {a.hidden_size}, vocabulary {a.vocab_size}",
        "embedding and head": _head_in_words(inspection),
        "form": " ".join(inspection.form.notes) or None,
        "experts": f"{a.num_experts}, {a.num_experts_per_tok} a token, layout "
        f"{inspection.expert_layout}"
        if a.is_moe
        else None,
        "written by": inspection.maker,
        "iteration": inspection.iteration,
        "padded vocabulary": inspection.padded_vocab_size,
        "dtype": ", ".join(inspection.dtypes),
        "weights": f"{size(inspection.nbytes)} in {counted(inspection.files, 'file')}",
        "parameters": f"{inspection.total_parameters:,} ({inspection.active_parameters:,} active)",
    }
    _print_facts(facts)
    parts = [(part, f"{count:,}") for part, count in inspection.parameters.items()]
    output.print(table("parameters by part", "part", ">count", rows=parts))
    if not tensors:
        form = "Megatron-Core" if inspection.kind == "megatron" else "Hugging Face"
        output.print(f"{len(inspection.tensors)} {form} tensors; --tensors lists them")
        return
    rows = [
        (plain(t.name), dimensions(t.shape), t.dtype, size(t.nbytes)) for t in inspection.tensors
    ]
    output.print(table("tensors", "name", "shape", "dtype", ">size", rows=rows))


def _head_in_words(inspection: Inspection) -> str | None:
    """Return ``tied`` or ``separate``; None if the head is no language model's."""
    if not inspection.form.head.is_language_model:
        return None  # the form says which head there is
    return "tied" if inspection.architecture.tie_word_embeddings else "separate"


def _show_adapter(adapter: AdapterInspection) -> None:
    """Print what a LoRA adapter is, and what it adapts."""
    c = adapter.config
    facts = {
        "what": "LoRA adapter (PEFT)",
        "checked against": adapter.base or "no model: pass one as --hf-config",
        "rank and alpha": f"{c['r']} and {c['lora_alpha']:g}{', rsLoRA' * c['use_rslora']}",
        "roles of experts": adapter.roles,
        "dtype": ", ".join(adapter.dtypes),
        "weights": f"{size(adapter.nbytes)} in {adapter.tensors} tensors",
        "parameters": f"{adapter.parameters:,}",
    }
    _print_facts(facts)
    lines = table("what it adapts", "parameter", ">count", ">rank", ">scaling", "A, B")
    for part in adapter.parts:
        rank, scaling = ("" if x is None else f"{x:g}" for x in (part.r, part.scaling))
        shapes = ", ".join(map(dimensions, part.shapes))
        lines.add_row(plain(part.name), str(part.count), rank, scaling, shapes)
    output.print(lines)
    for note in adapter.notes:
        output.print(plain(note))


def _show_mapping(lines: Sequence[MappingLine]) -> None:
    """Print the mapping, in the order of the network."""
    shown = table(
        "mapping, with the shape of one piece and the axes on which pieces are stacked",
        "Hugging Face", "shape", "Megatron-Core", "shape", "stacked", "transform", "cut by",
    )  # fmt: skip
    for column in shown.columns:
        column.overflow = "fold"  # a name cut short would be useless
    for line in lines:
        parts = f" in {line.tp_parts} parts" if line.tp_parts > 1 else ""
        shown.add_row(
            "\n".join(map(plain, line.hf)),
            "\n".join(map(dimensions, line.hf_shapes)),
            plain(line.mcore),
            dimensions(line.shape),
            dimensions(line.stacked),
            plain(line.transform),
            f"{line.cut_by}: axis {line.tp_axis}{parts}" if line.cut_by else "",
        )
    output.print(shown, width=None if output.is_terminal else MAPPING_WIDTH, crop=False)


def _show_estimate(estimate: Estimate) -> None:
    """Print what a conversion will take."""
    facts = {
        "model": f"{estimate.model}, {estimate.dtype}",
        "tensors": f"{estimate.tensors:,} of Hugging Face, in {estimate.pieces:,} pieces and "
        f"{counted(estimate.units, 'unit')} of work",
        "bytes": f"{estimate.nbytes:,} ({size(estimate.nbytes)})",
        "largest slice": f"{size(estimate.largest_slice_bytes)} ({estimate.largest_slice})",
        "memory, at most": f"{size(estimate.memory_bound_bytes)} for "
        f"{counted(estimate.workers, 'worker')}",
    }
    if estimate.seconds is not None:
        facts["time"] = (
            f"{estimate.seconds:,.0f} s to read and write everything once at "
            f"{estimate.disk_gb_per_s:g} GB/s"
        )
    _print_facts(facts, soft_wrap=True)


def _print_facts(facts: Mapping[str, Any], **options: Any) -> None:
    """Print a line for each fact that is not None."""
    for name, fact in facts.items():
        if fact is not None:
            output.print(f"{name:20}{plain(str(fact))}", **options)
