"""``mcore-qwen3vl convert`` and ``lora``: checkpoints, and PEFT's adapters, in other forms."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options, show
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.offline.engine import ConversionPlan


app = typer.Typer(help="Convert checkpoints, without a GPU.", no_args_is_help=True)


Dtype = Annotated[Literal["keep", "bf16", "fp16", "fp32"], typer.Option(help="Dtype to write.")]
MaxShardSize = Annotated[str, typer.Option(help="Largest safetensors file.")]
ExpertLayoutChoice = Literal["source", "published", "v5"]
"""Layout of fused experts and config in an exported checkpoint."""


def _legacy_size(flag: str, what: str, default: str = "1") -> Any:
    """Return an option for a size of the layout that `--format torch` writes; None: not given."""
    return typer.Option(
        f"--{flag}",
        min=1,
        help=f"{what} (--format torch; default: {default}).",
        rich_help_panel="Legacy format",
    )


def carry_out(
    plan: "Callable[[], ConversionPlan]",
    dst: Path,
    *,
    force: bool,
    workers: int | None,
    dry_run: bool,
    json: bool,
    strict: bool = False,
    doing: str = "converting",
) -> None:
    """Show the plan of a conversion, or convert and show the result.

    After Ctrl-C, the next run continues with what is done.
    """
    from mcore_qwen3vl.converters.convert import write

    if dry_run:
        show.plan(plan(), json)
        return
    try:
        with console.byte_progress(doing, quiet=json) as report:
            summary = write(plan, dst, force=force, workers=workers, progress=report, strict=strict)
    except KeyboardInterrupt:
        console.messages.print("interrupted: run the same command to continue")
        raise typer.Exit(130) from None
    show.summary(summary, json)


@app.command("hf-to-mcore")
def hf_to_mcore(
    src: Annotated[
        Path,
        options.source(
            "SRC", "Hugging Face checkpoint directory, or hub id: OWNER/NAME[@REVISION]."
        ),
    ],
    dst: Annotated[Path, typer.Argument(help="Megatron-Core checkpoint directory to write.")],
    dtype: Dtype = "keep",
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="Pad the vocabulary to a multiple of this times --tp.")
    ] = 1,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel size for padding and for --format torch.")
    ] = 1,
    format: Annotated[
        Literal["torch_dist", "torch"],
        typer.Option(help="torch_dist loads under any layout; torch (legacy) only under its own."),
    ] = "torch_dist",
    pp: Annotated[int | None, _legacy_size("pp", "Pipeline parallel size")] = None,
    vpp: Annotated[int | None, _legacy_size("vpp", "Virtual stages per pipeline rank")] = None,
    ep: Annotated[int | None, _legacy_size("ep", "Expert parallel size")] = None,
    etp: Annotated[
        int | None, _legacy_size("etp", "Expert tensor parallel size", "--tp, as in Megatron")
    ] = None,
    first: Annotated[
        int | None,
        _legacy_size("decoder-first-pipeline-num-layers", "Layers of the first rank", "equal"),
    ] = None,
    last: Annotated[
        int | None,
        _legacy_size("decoder-last-pipeline-num-layers", "Layers of the last rank", "equal"),
    ] = None,
    spec: Annotated[
        Literal["te", "torch"] | None,
        typer.Option(
            help="Layer spec (--format torch; default: te).", rich_help_panel="Legacy format"
        ),
    ] = None,
    dialect: Annotated[
        Literal["megatron-bridge", "ms-swift"] | None,
        typer.Option(help="Write the keys of another project, for its own loader."),
    ] = None,
    workers: options.Workers = None,
    force: options.Force = False,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Hugging Face to Megatron-Core ([bold]torch_dist[/], loads under any parallel layout)."""
    from mcore_qwen3vl.converters import convert

    layout = None
    if format == "torch":
        layout = Layout(tp, pp or 1, vpp or 1, ep or 1, etp or tp, first=first, last=last)
    elif any((pp, vpp, ep, etp, first, last, spec)):
        raise BadInput(
            "--format torch_dist loads under any layout and layer spec: leave the flags of the "
            "legacy format out, or add --format torch."
        )
    plan = partial(
        convert.plan_hf_to_mcore,
        src,
        dtype=dtype,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        format=format,
        layout=layout,
        spec=spec,
        dialect=dialect,
    )
    carry_out(plan, dst, force=force, workers=workers, dry_run=dry_run, json=json, strict=strict)


@app.command("mcore-to-hf")
def mcore_to_hf(
    src: Annotated[Path, typer.Argument(help="Megatron-Core checkpoint directory.")],
    dst: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory to write.")],
    hf_config: Annotated[
        Path | None,
        options.config("Directory with config and tokenizer, or hub id; the default is SRC/hf."),
    ] = None,
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    expert_layout: Annotated[
        ExpertLayoutChoice,
        typer.Option(help="source: as the checkpoint came; published: transformers 4.57; v5."),
    ] = "source",
    workers: options.Workers = None,
    force: options.Force = False,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Megatron-Core to Hugging Face (safetensors)."""
    from mcore_qwen3vl.converters import convert

    plan = partial(
        convert.plan_mcore_to_hf,
        src,
        hf_config=hf_config,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )
    carry_out(plan, dst, force=force, workers=workers, dry_run=dry_run, json=json, strict=strict)


@app.command("hf-to-hf")
def hf_to_hf(
    src: Annotated[Path, options.source("SRC", "Hugging Face checkpoint directory, or hub id.")],
    dst: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory to write.")],
    expert_layout: Annotated[
        ExpertLayoutChoice,
        typer.Option(help="published: vLLM, transformers 4.57 and 5; v5: transformers 5; source."),
    ] = "source",
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    workers: options.Workers = None,
    force: options.Force = False,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Hugging Face to Hugging Face: the other layout of fused experts, another dtype."""
    from mcore_qwen3vl.converters import convert

    plan = partial(
        convert.plan_hf_to_hf,
        src,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )
    carry_out(plan, dst, force=force, workers=workers, dry_run=dry_run, json=json, strict=strict)


lora = typer.Typer(help="LoRA adapters, as PEFT stores them.", no_args_is_help=True)


RolesChoice = Literal["canonical", "swapped"]
"""The conventions for which factor of a fused expert takes its input."""

FromRoles = Annotated[
    RolesChoice | None,
    typer.Option(
        help="Roles of the experts' factors in ADAPTER, if their shapes do not show them."
    ),
]


@lora.command("merge")
def lora_merge(
    base: Annotated[Path, options.source("BASE", "Hugging Face checkpoint directory, or hub id.")],
    adapter: Annotated[Path, options.source("ADAPTER", "PEFT adapter directory, or hub id.")],
    out: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory to write.")],
    expert_layout: Annotated[
        ExpertLayoutChoice | None,
        typer.Option(
            help="Layout to write; default: published for MoE (vLLM, transformers 4.57 and 5)."
        ),
    ] = None,
    dtype: Dtype = "keep",
    max_shard_size: MaxShardSize = "5GB",
    from_roles: FromRoles = None,
    workers: options.Workers = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Write BASE with ADAPTER merged into it, as a stream: no model is built."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.adapters import merge as merging

    plan = partial(
        merging.plan_merge,
        base,
        adapter,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
        roles=from_roles,
    )
    carry_out(plan, out, force=force, workers=workers, dry_run=dry_run, json=json, doing="merging")


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
    from mcore_qwen3vl.converters.adapters.config import AdapterConfig
    from mcore_qwen3vl.converters.adapters.files import convert_adapter
    from mcore_qwen3vl.converters.adapters.inspect import require_base, vllm_notes

    base = require_base(AdapterConfig.from_file(adapter), hf_config)
    read = convert_adapter(adapter, out, base, roles=roles, from_roles=from_roles, force=force)
    notes = vllm_notes(read, Architecture.from_hf(base), roles)
    result = {"target": str(out), "from": read.roles, "to": roles, "notes": notes}
    if json:
        console.emit_json(result)
    else:
        console.output.print(f"[bold green]done[/] {console.plain(str(out))}")
        console.output.print(f"fused experts: {read.roles} roles to {roles} roles")
        for note in notes:
            console.output.print(console.plain(note))
