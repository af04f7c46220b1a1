"""``mcore-qwen3vl verify trace``."""

from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import Json, ReportFolder, conclude, layout_flags
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout


@layout_flags()
def verify_trace(
    hf: Annotated[
        Path, sources.argument("HF", "Hugging Face checkpoint directory or hub id: the reference.")
    ],
    layout: Layout,
    mcore: Annotated[
        Path | None,
        typer.Argument(
            metavar="MCORE",
            help="Megatron-Core checkpoint to examine; default: HF is loaded directly.",
        ),
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video; may be repeated.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask about images and videos.")] = None,
    batch: Annotated[
        str, typer.Option(help="Without --prompt: the parity batch to use.")
    ] = "mixed",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Compare gradients of the loss as well.")
    ] = False,
    lora: Annotated[
        Path | None,
        sources.adapter_option("A PEFT adapter for both models; PEFT's model is the reference."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit for the ranks, in seconds.")] = 600.0,
    report: ReportFolder = None,
    json: Json = False,
) -> None:
    """Find the first place where the two models differ, and why.

    Hugging Face's model runs on this machine in float32 and float64, which takes 12 bytes a
    parameter (24 with --gradients) besides ours in float32 on the CPU. For a model too large for
    that, trace a copy with fewer layers.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    from mcore_qwen3vl.verify.parity.case import Case
    from mcore_qwen3vl.verify.trace.tracing import from_prompt, trace

    if (image or video) and prompt is None:
        raise BadInput("--image and --video need a --prompt that asks about them.")
    micro = None
    if prompt is not None:
        micro = from_prompt(
            hf, prompt, image or [], video or [], multiple=Case(layout=layout).multiple
        )
    result = trace(
        hf,
        mcore,
        layout=layout,
        micro=micro,
        batch=batch,
        gradients=gradients,
        lora=lora,
        timeout=timeout,
    )
    conclude(result, report, json)
