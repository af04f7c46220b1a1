"""``mcore-qwen3vl convert`` and ``lora``: checkpoints, and PEFT's adapters, in other forms."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.console import counted, dimensions, output, plain, size, table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.unused.fields import Unused, as_json

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.convert import ConversionPlan, ConversionResult, PartResult
    from mcore_qwen3vl.converters.offline.engine import Writing

_NAMED = 5  # parts that are not done and named; the others are counted

app = typer.Typer(help="Convert checkpoints, without a GPU.", no_args_is_help=True)
lora = typer.Typer(help="LoRA adapters, as PEFT stores them.", no_args_is_help=True)

HFSource = Annotated[
    Path,
    options.source(
        "SRC", "Hugging Face checkpoint directory, or hub id: OWNER/NAME or OWNER/NAME@REVISION."
    ),
]
Dtype = Annotated[Literal["keep", "bf16", "fp16", "fp32"], typer.Option(help="Dtype to write.")]
MaxShardSize = Annotated[str, typer.Option(help="Largest safetensors file.")]
ExpertLayoutChoice = Literal["source", "published", "v5"]
"""Layout of fused experts and config in an exported checkpoint."""
RolesChoice = Literal["canonical", "swapped"]
"""The conventions for which factor of a fused expert takes its input."""
WhichPart = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Do only part I of N, from 0 to N - 1, on any machine that sees DST under the same "
        "path, as Slurm's --array=0-15 and Kubernetes' indexed jobs count: "
        "$SLURM_ARRAY_TASK_ID/16, $JOB_COMPLETION_INDEX/16. The part that ends last writes DST. A "
        "part that is done already stays.",
        rich_help_panel="Parts, on any number of machines",
    ),
]
FromRoles = Annotated[
    RolesChoice | None,
    typer.Option(
        help="Roles of the experts' factors in ADAPTER, if their shapes do not show them."
    ),
]


def carry_out(
    plan: "Callable[[], ConversionPlan]",
    dst: Annotated[Path, typer.Argument(help="Checkpoint directory to write.")],
    *,
    workers: options.Workers = None,
    force: options.Force = False,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    part: WhichPart = None,
    json: options.Json = False,
) -> None:
    """Show a planned conversion, or carry it out and show the result.

    After Ctrl-C, the next run continues with what is done.
    """
    from mcore_qwen3vl.converters.convert import write, write_part
    from mcore_qwen3vl.part import Part
    from mcore_qwen3vl.unused.folder import unused_of

    unused: list[Unused] = []
    which = None if part is None else Part.parse(part)
    if which is not None and dry_run:
        raise BadInput("--dry-run shows the plan of all parts: leave --part out.")

    def plan_and_print_unused() -> "ConversionPlan":
        planned = plan()
        unused.extend([*unused_of(planned.companion_files["config.json"].parent), *planned.unused])
        if not json:
            console.print_unused(unused)
        return planned

    if dry_run:
        planned = plan_and_print_unused()
        steps = [asdict(tensor) for tensor in planned.planned]
        facts = {"direction": planned.direction, "bytes": planned.nbytes, "steps": steps}
        console.present(json, {**facts, "unused": as_json(unused)}, _show_plan, planned)
        return
    try:
        with console.byte_progress("converting", quiet=json) as report:
            how: Writing = {
                "force": force,
                "workers": workers,
                "progress": report,
                "strict": strict,
            }
            done = None if which is None else write_part(plan_and_print_unused, dst, which, **how)
            summary = write(plan_and_print_unused, dst, **how) if done is None else done.published
    except KeyboardInterrupt:
        console.messages.print("interrupted: run the same command to continue")
        raise typer.Exit(130) from None
    if done is not None:
        facts = {**asdict(done), "part": done.part.index, "of": done.part.count}
        facts["missing"] = [str(each) for each in done.missing]
        console.present(json, {**facts, "unused": as_json(unused)}, _show_part, done)
    elif summary is not None:
        facts = {**asdict(summary), "unused": as_json(unused)}
        console.present(json, facts, _show_summary, summary)


def _show_part(done: "PartResult") -> None:
    """Print what a part did, and what is missing; or what the conversion did, if it is whole."""
    output.print(
        f"part {done.part}: {counted(done.units, 'unit')} of work, {size(done.nbytes)}, "
        f"{done.seconds:.1f} s"
    )
    if done.resumed_units:
        were = counted(done.resumed_units, "unit")
        output.print(f"{were} had been done before")
    if done.published is not None:
        _show_summary(done.published)
        return
    shown = ", ".join(map(str, done.missing[:_NAMED]))
    more = f" and {len(done.missing) - _NAMED:,} more" if len(done.missing) > _NAMED else ""
    output.print(plain(f"{done.target} is not written yet: not done are parts {shown}{more}"))
    for note in done.notes:
        output.print(plain(note))


def _show_plan(plan: "ConversionPlan") -> None:
    """Print a dry run: one line for each tensor, then the totals."""
    lines = table(f"{plan.direction}: {plan.source}", "from", "to", "shape", "dtype", ">size")
    for tensor in plan.planned:
        sources, target = plain(", ".join(tensor.sources)), plain(tensor.target)
        lines.add_row(sources, target, dimensions(tensor.shape), tensor.dtype, size(tensor.nbytes))
    output.print(lines)
    for note in plan.notes:
        output.print(plain(note))
    output.print(
        f"{plan.tensors_in_words} in {counted(len(plan.planned), 'piece')}, "
        f"{size(plan.nbytes)} in {counted(len(plan.units), 'unit')} of work; "
        f"{counted(len(plan.companion_files), 'other file')}. Nothing was written."
    )


def _show_summary(summary: "ConversionResult") -> None:
    """Print what a conversion did."""
    rate = size(summary.nbytes / max(summary.seconds, 1e-9))
    output.print(f"[bold green]done[/] {plain(summary.target)}")
    output.print(
        f"{summary.tensors_in_words}, {size(summary.nbytes)} of "
        f"{'/'.join(summary.dtypes)} in {counted(summary.files, 'file')} and "
        f"{counted(len(summary.companion_files), 'other file')}, "
        f"{summary.seconds:.1f} s ({rate}/s)"
    )
    if summary.resumed_units:
        output.print(f"continued an interrupted run: {summary.resumed_units} units were done")
    for note in summary.notes:
        output.print(plain(note))


@app.command("hf-to-mcore")
@options.then(carry_out)
@options.layout_flags(dict, without=("cp", "dp", "sp"))
def hf_to_mcore(
    src: HFSource,
    layout: dict[str, Any],
    *,
    dtype: Dtype = "keep",
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="Pad the vocabulary to a multiple of this times --tp.")
    ] = 1,
    format: Annotated[
        Literal["torch_dist", "torch"],
        typer.Option(
            help="torch_dist loads under any layout; torch (legacy) only under the one that flags "
            "give, in which ETP is TP by default."
        ),
    ] = "torch_dist",
    spec: Annotated[
        Literal["te", "torch"] | None,
        typer.Option(help="Layer spec of --format torch; default: te."),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            metavar="[megatron-bridge|ms-swift|hybrid]",
            help="Write the keys of another project, for its own loader; hybrid: those of "
            "Megatron-Core's HybridModel.",
        ),
    ] = None,
) -> "ConversionPlan":
    """Hugging Face to Megatron-Core ([bold]torch_dist[/], loads under any parallel layout)."""
    from mcore_qwen3vl.converters.convert import plan_hf_to_mcore

    tp = layout.get("tp", 1)
    if format != "torch" and (layout.keys() - {"tp"} or spec):
        raise BadInput(
            "--format torch_dist loads under any layout and layer spec: leave the flags of the "
            "legacy format out, or add --format torch."
        )
    return plan_hf_to_mcore(
        src,
        dtype=dtype,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        format=format,
        layout=Layout(**{"etp": tp, **layout}) if format == "torch" else None,
        spec=spec,
        dialect=dialect,
    )


@app.command("mcore-to-hf")
@options.then(carry_out)
def mcore_to_hf(
    src: Annotated[Path, typer.Argument(help="Megatron-Core checkpoint directory.")],
    hf_config: Annotated[
        Path | None,
        options.config("Directory with config and tokenizer, or hub id; the default is SRC/hf."),
    ] = None,
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    expert_layout: Annotated[
        ExpertLayoutChoice,
        typer.Option(
            help="source: as the checkpoint came; published: transformers 4.57; v5. Qwen3.5 has "
            "one fused layout, which published and v5 both write."
        ),
    ] = "source",
    model_card: Annotated[
        bool,
        typer.Option(
            "--model-card",
            help="Write a model card, README.md, for the hub: base, versions, and of a run of this "
            "package data and settings too, by names and without paths.",
        ),
    ] = False,
    certificate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="With --model-card: quote the verdict of this report.json, which verify --report "
            "writes. May be repeated.",
        ),
    ] = None,
) -> "ConversionPlan":
    """Megatron-Core to Hugging Face (safetensors)."""
    from mcore_qwen3vl.converters.convert import plan_mcore_to_hf

    if certificate and not model_card:
        raise BadInput("--certificate is quoted in a model card: add --model-card, or drop it.")
    made = _model_card_of(src, hf_config, certificate or ()) if model_card else None
    plan = plan_mcore_to_hf(
        src,
        hf_config=hf_config,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
        files=made[0] if made else {},
    )
    return replace(plan, notes=(*plan.notes, *made[1])) if made else plan


def _model_card_of(
    src: Path, hf_config: Path | None, certificates: Iterable[Path]
) -> tuple[dict[str, bytes], list[str]]:
    """Return the card of a checkpoint, by its file's name, and what to say of it."""
    from mcore_qwen3vl import model_card
    from mcore_qwen3vl.converters.hf.companions import read_form
    from mcore_qwen3vl.converters.identify import identify

    place = identify(src)
    place.require_megatron()
    folder = place.config() if hf_config is None else identify(hf_config).require_directory()
    training, base = None, model_card.name_of_source(place)
    if isinstance(step := place.iteration, int):
        from mcore_qwen3vl.training.contract.record import RunRecord  # imports megatron

        if record := RunRecord.of_checkpoint(place.folder.parent, step):
            training, base = model_card.Training(record.rows, step), record.base
    content = model_card.model_card(
        base=base,
        config=folder,
        head=read_form(folder).head,
        training=training,
        quotes=[model_card.quote(file) for file in certificates],
    )
    note = model_card.note_on_base(base)
    return {model_card.FILE: content}, [note] if note else []


@app.command("hf-to-hf")
@options.then(carry_out)
def hf_to_hf(
    src: HFSource,
    expert_layout: Annotated[
        ExpertLayoutChoice,
        typer.Option(
            help="published: vLLM, transformers 4.57 and 5; v5: transformers 5; source. Qwen3.5 "
            "has one fused layout, which published and v5 both write."
        ),
    ] = "source",
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    resize_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            help="Give embedding and head this many rows, for tokens that were added to the "
            "tokenizer; each new row is the mean of the old ones.",
        ),
    ] = None,
) -> "ConversionPlan":
    """Hugging Face to Hugging Face: the other layout of fused experts, another dtype, more rows."""
    from mcore_qwen3vl.converters.convert import plan_hf_to_hf

    return plan_hf_to_hf(
        src,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
        vocab_size=resize_vocab,
    )


@lora.command("merge")
@options.then(carry_out)
def lora_merge(
    base: Annotated[Path, options.source("BASE", "Hugging Face checkpoint directory, or hub id.")],
    adapter: Annotated[Path, options.source("ADAPTER", "PEFT adapter directory, or hub id.")],
    expert_layout: Annotated[
        ExpertLayoutChoice | None,
        typer.Option(
            help="Layout to write; default: published for MoE (vLLM, transformers 4.57 and 5). "
            "Qwen3.5 has one fused layout, whichever is named."
        ),
    ] = None,
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    from_roles: FromRoles = None,
) -> "ConversionPlan":
    """Write BASE with ADAPTER merged into it, as a stream: no model is built."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.adapters.merge import plan_merge

    return plan_merge(
        base,
        adapter,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
        roles=from_roles,
    )


@lora.command("convert")
def lora_convert(
    adapter: Annotated[Path, options.source("ADAPTER", "PEFT adapter directory, or hub id.")],
    out: Annotated[Path, typer.Argument(help="PEFT adapter directory to write.")],
    roles: Annotated[
        RolesChoice,
        typer.Option(
            help="canonical: PEFT 0.21 with transformers 5, 0.18 with 4.57, vLLM; swapped: PEFT "
            "0.18 with transformers 5, 0.21 with 4.57."
        ),
    ] = "canonical",
    from_roles: FromRoles = None,
    hf_config: Annotated[
        Path | None,
        options.config("Directory with the model's config, or hub id; default: ADAPTER's own."),
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Turn the factors of fused experts from one of PEFT's two conventions to the other."""
    console.quiet_libraries()
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.converters.adapters.adapter import convert_adapter
    from mcore_qwen3vl.converters.adapters.config import AdapterConfig
    from mcore_qwen3vl.converters.adapters.inspection import require_base
    from mcore_qwen3vl.converters.adapters.vllm import vllm_notes

    config = AdapterConfig.from_file(adapter)
    base = require_base(config, hf_config)
    read = convert_adapter(adapter, out, base, roles=roles, from_roles=from_roles, force=force)
    notes = vllm_notes(read, Architecture.from_hf(base), roles)
    result: dict[str, Any] = {"target": str(out), "from": read.roles, "to": roles, "notes": notes}
    said = [str(out), f"fused experts: {read.roles} roles to {roles} roles", *notes]
    shown = "\n".join(map(plain, said))
    result |= {"unused": as_json(config.unused)}
    console.present(json, result, output.print, f"[bold green]done[/] {shown}")
    if not json:
        console.print_unused(config.unused)
