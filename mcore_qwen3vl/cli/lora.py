"""``mcore-qwen3vl lora``: PEFT's adapters."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.convert import Dtype, ExpertLayoutChoice, MaxShardSize, carry_out
from mcore_qwen3vl.cli.options import DryRun, Force, Json, Workers

app = typer.Typer(help="LoRA adapters, as PEFT stores them.", no_args_is_help=True)


RolesChoice = Literal["canonical", "swapped"]
"""The conventions for which factor of a fused expert takes its input."""

FromRoles = Annotated[
    RolesChoice | None,
    typer.Option(
        help="Roles of the experts' factors in ADAPTER, if their shapes do not show them."
    ),
]


@app.command("merge")
def merge(
    base: Annotated[
        Path, sources.argument("BASE", "Hugging Face checkpoint directory, or hub id.")
    ],
    adapter: Annotated[Path, sources.argument("ADAPTER", "PEFT adapter directory, or hub id.")],
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
    workers: Workers = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
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


@app.command("convert")
def convert(
    adapter: Annotated[Path, sources.argument("ADAPTER", "PEFT adapter directory, or hub id.")],
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
        sources.option("Directory with the model's config, or hub id; default: ADAPTER's own."),
    ] = None,
    force: Force = False,
    json: Json = False,
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
