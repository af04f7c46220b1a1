"""``mcore-qwen3vl convert``: between Hugging Face and Megatron-Core."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import DryRun, Force, Json, Workers

app = typer.Typer(help="Convert checkpoints, without a GPU.", no_args_is_help=True)


class Dtype(StrEnum):
    """Dtype of the written floating-point tensors."""

    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class ExpertLayoutChoice(StrEnum):
    """Layout of fused experts and config in an exported checkpoint."""

    source = "source"
    published = "published"
    v5 = "v5"


@app.command("hf-to-mcore")
def hf_to_mcore(
    src: Annotated[
        Path,
        sources.argument(
            "SRC", "Hugging Face checkpoint directory, or hub id: OWNER/NAME[@REVISION]."
        ),
    ],
    dst: Annotated[Path, typer.Argument(help="Megatron-Core checkpoint directory to write.")],
    dtype: Annotated[Dtype, typer.Option(help="Dtype to write.")] = Dtype.keep,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="Pad the vocabulary to a multiple of this times --tp.")
    ] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallel size the padding is for.")] = 1,
    workers: Workers = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Hugging Face to Megatron-Core ([bold]torch_dist[/], loads under any parallel layout)."""
    from mcore_qwen3vl.converters import convert

    options = {
        "dtype": dtype.value,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "tp": tp,
    }
    if dry_run:
        console.show_plan(convert.plan_hf_to_mcore(src, **options), json)
        return
    with console.byte_progress("converting", quiet=json) as report:
        summary = convert.hf_to_mcore(
            src, dst, **options, force=force, workers=workers, progress=report
        )
    console.show_summary(summary, json)


@app.command("mcore-to-hf")
def mcore_to_hf(
    src: Annotated[Path, typer.Argument(help="Megatron-Core checkpoint directory.")],
    dst: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory to write.")],
    hf_config: Annotated[
        Path | None,
        sources.option("Directory with config and tokenizer, or hub id; the default is SRC/hf."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype to write.")] = Dtype.keep,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    expert_layout: Annotated[
        ExpertLayoutChoice,
        typer.Option(help="source: as the checkpoint came; published: transformers 4.57; v5."),
    ] = ExpertLayoutChoice.source,
    workers: Workers = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Megatron-Core to Hugging Face (safetensors)."""
    from mcore_qwen3vl.converters import convert

    options = {
        "hf_config": hf_config,
        "dtype": dtype.value,
        "max_shard_size": max_shard_size,
        "expert_layout": expert_layout.value,
    }
    if dry_run:
        console.show_plan(convert.plan_mcore_to_hf(src, **options), json)
        return
    with console.byte_progress("converting", quiet=json) as report:
        summary = convert.mcore_to_hf(
            src, dst, **options, force=force, workers=workers, progress=report
        )
    console.show_summary(summary, json)
