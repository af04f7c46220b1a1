"""The output of the commands' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mcore_qwen3vl.console import counted, emit_json, output, plain, size, table

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.adapters.inspect import AdapterInspection
    from mcore_qwen3vl.converters.describe import Estimate, Inspection, MappingLine
    from mcore_qwen3vl.converters.offline.engine import ConversionPlan, ConversionResult
    from mcore_qwen3vl.data.check import DataReport
    from mcore_qwen3vl.demos import Demo
    from mcore_qwen3vl.scoring.output import Tally

PROBLEMS_SHOWN = 20
MAPPING_WIDTH = 260
"""The width at which no name of the mapping is folded, for pipes and files."""


def plan(plan: ConversionPlan, as_json: bool) -> None:
    """Print a dry run: one line for each tensor, then the totals."""
    if as_json:
        steps = [asdict(tensor) for tensor in plan.planned]
        emit_json({"direction": plan.direction, "bytes": plan.nbytes, "steps": steps})
        return
    lines = table(f"{plan.direction}: {plan.source}", "from", "to", "shape", "dtype", ">size")
    for tensor in plan.planned:
        sources, target = plain(", ".join(tensor.sources)), plain(tensor.target)
        lines.add_row(sources, target, _shape(tensor.shape), tensor.dtype, size(tensor.nbytes))
    output.print(lines)
    for note in plan.notes:
        output.print(plain(note))
    output.print(
        f"{plan.counted} in {counted(len(plan.planned), 'piece')}, "
        f"{size(plan.nbytes)} in {counted(len(plan.units), 'unit')} of work; "
        f"{counted(len(plan.companion_files), 'other file')}. Nothing was written."
    )


def summary(summary: ConversionResult, as_json: bool) -> None:
    """Print what a conversion did."""
    if as_json:
        emit_json(asdict(summary))
        return
    rate = size(summary.nbytes / max(summary.seconds, 1e-9))
    output.print(f"[bold green]done[/] {plain(summary.target)}")
    output.print(
        f"{summary.counted}, {size(summary.nbytes)} of "
        f"{'/'.join(summary.dtypes)} in {counted(summary.files, 'file')} and "
        f"{counted(len(summary.companion_files), 'other file')}, "
        f"{summary.seconds:.1f} s ({rate}/s)"
    )
    if summary.resumed_units:
        output.print(f"continued an interrupted run: {summary.resumed_units} units were done")
    for note in summary.notes:
        output.print(plain(note))


def inspection(inspection: Inspection, tensors: bool) -> None:
    """Print what a path is, its parameters by part, and with `tensors` each of its tensors."""
    a = inspection.architecture
    kinds = {"huggingface": "Hugging Face checkpoint", "megatron": "Megatron-Core checkpoint"}
    facts = {
        "what": kinds.get(inspection.kind, "config without weights"),
        "model": f"Qwen3-VL {'MoE' if a.is_moe else 'dense'}, {a.num_hidden_layers} layers, "
        f"hidden {a.hidden_size}, vocabulary {a.vocab_size}",
        "embedding and head": _head(inspection),
        "form": " ".join(inspection.form.notes) or None,
        "experts": f"{a.num_experts}, {a.num_experts_per_tok} a token, layout "
        f"{inspection.expert_layout}"
        if a.is_moe
        else None,
        "written by": inspection.maker,
        "iteration": inspection.iteration,
        "padded vocabulary": inspection.padded_vocab_size,
        "dtype": ", ".join(inspection.dtypes),
        "weights": f"{size(inspection.nbytes)} in {inspection.files} files",
        "parameters": f"{inspection.total_parameters:,} ({inspection.active_parameters:,} active)",
    }
    _print(facts)
    parts = table("parameters by part", "part", ">count")
    for part, count in inspection.parameters.items():
        parts.add_row(part, f"{count:,}")
    output.print(parts)
    if not tensors:
        form = "Megatron-Core" if inspection.kind == "megatron" else "Hugging Face"
        output.print(f"{len(inspection.tensors)} {form} tensors; --tensors lists them")
        return
    lines = table("tensors", "name", "shape", "dtype", ">size")
    for t in inspection.tensors:
        lines.add_row(plain(t.name), _shape(t.shape), t.dtype, size(t.nbytes))
    output.print(lines)


def _head(inspection: Inspection) -> str | None:
    if not inspection.form.head.is_language_model:
        return None  # the form says which head there is
    return "tied" if inspection.architecture.tie_word_embeddings else "separate"


def adapter(adapter: AdapterInspection) -> None:
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
    _print(facts)
    lines = table("what it adapts", "parameter", ">count", ">rank", ">scaling", "A, B")
    for part in adapter.parts:
        rank, scaling = ("" if x is None else f"{x:g}" for x in (part.r, part.scaling))
        shapes = ", ".join(map(_shape, part.shapes))
        lines.add_row(plain(part.name), str(part.count), rank, scaling, shapes)
    output.print(lines)
    for note in adapter.notes:
        output.print(plain(note))


def mapping(lines: Sequence[MappingLine]) -> None:
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
            plain("\n".join(line.hf)),
            "\n".join(map(_shape, line.hf_shapes)),
            plain(line.mcore),
            _shape(line.shape),
            _shape(line.stacked),
            line.transform,
            f"{line.cut_by}: axis {line.tp_axis}{parts}" if line.cut_by else "",
        )
    output.print(shown, width=None if output.is_terminal else MAPPING_WIDTH, crop=False)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def estimate(estimate: Estimate) -> None:
    """Print what a conversion will take."""
    facts = {
        "model": f"{estimate.model}, {estimate.dtype}",
        "tensors": f"{estimate.tensors:,} of Hugging Face, in {estimate.pieces:,} pieces and "
        f"{estimate.units} units of work",
        "bytes": f"{estimate.nbytes:,} ({size(estimate.nbytes)})",
        "largest slice": f"{size(estimate.largest_slice_bytes)} ({estimate.largest_slice})",
        "memory, at most": f"{size(estimate.memory_bound_bytes)} for {estimate.workers} workers",
    }
    if estimate.seconds is not None:
        facts["time"] = (
            f"{estimate.seconds:,.0f} s to read and write everything once at "
            f"{estimate.disk_gb_per_s:g} GB/s"
        )
    _print(facts, soft_wrap=True)


def _print(facts: Mapping[str, Any], **options: Any) -> None:
    for name, fact in facts.items():
        if fact is not None:
            output.print(f"{name:20}{plain(str(fact))}", **options)


def demo(demo: Demo) -> None:
    """Print the demo's steps and their results."""
    lines = table("Qwen3-VL: Hugging Face to Megatron-Core and back", "step", "result", "", ">time")
    marks = {None: "", True: "[green]ok[/]", False: "[bold red]WRONG[/]"}
    for step in demo.steps:
        lines.add_row(step.name, plain(step.result), marks[step.ok], f"{step.seconds:.1f} s")
    output.print(lines)


def data_report(report: DataReport) -> None:
    """Print what a data set holds, and the first of its flaws."""
    lines = table(str(report.path), "what", ">how much")
    for name, amount in report.summary():
        lines.add_row(plain(name), plain(amount))
    output.print(lines)
    for advice in report.advice():
        output.print(f"  {plain(advice)}", soft_wrap=True)
    for flaws in (report.bad, report.overlong):
        for flaw in flaws[:PROBLEMS_SHOWN]:
            output.print(f"  {plain(flaw.sample)}: {plain(flaw.reason)}", soft_wrap=True)
        if len(flaws) > PROBLEMS_SHOWN:
            output.print(f"  and {len(flaws) - PROBLEMS_SHOWN} more; --json lists them all")


def scores(found: Tally, written: str) -> None:
    """Print what a file of scores holds."""
    rows = [
        ("records", f"{found.records:,}, of which {found.scored:,} scored"),
        ("left out", f"{found.bad:,} bad, {found.overlong:,} over-long"),
        ("embeddings", _count(found.embeddings)),
        ("rewards", _count(found.rewards)),
        ("labels", ", ".join(f"{name} {count:,}" for name, count in found.labels.items())),
        ("documents", _count(found.documents)),
        ("positive is first", _number(found.positive_first)),
        ("trained tokens", _count(found.tokens)),
        ("log-probability", _number(found.log_prob if found.tokens else None)),
        ("perplexity", _number(found.perplexity)),
        ("entropy of a token", _number(found.entropy)),
        ("perplexity of chosen", _number(found.chosen_perplexity)),
        ("perplexity of rejected", _number(found.rejected_perplexity)),
        (
            "chosen has the higher reward" if found.rewards else "chosen is likelier",
            _number(found.chosen_preferred),
        ),
    ]
    lines = table("", "what", ">")
    for name, text in rows:
        if text:
            lines.add_row(name, text)
    output.print(lines)
    output.print(f"  in {plain(written)}", soft_wrap=True)


def _count(value: int) -> str:
    return f"{value:,}" if value else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4f}"
