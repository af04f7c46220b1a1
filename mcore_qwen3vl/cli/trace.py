"""``mcore-qwen3vl verify trace``."""

from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import JsonFile, require
from mcore_qwen3vl.errors import BadInput


def verify_trace(
    hf: Annotated[
        Path, sources.argument("HF", "Hugging Face checkpoint directory or hub id: the truth.")
    ],
    mcore: Annotated[
        Path | None,
        typer.Argument(help="Megatron-Core checkpoint to examine; default: HF is loaded directly."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="Parallel sizes, as in tp2xpp2+sp; also vpp, ep, etp, cp, dp."),
    ] = "single",
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask about the images.")] = None,
    batch: Annotated[
        str, typer.Option(help="Without image and prompt: the parity batch to take.")
    ] = "mixed",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Compare gradients of the loss as well.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for the ranks to finish.")] = 600.0,
    report: Annotated[
        Path | None, typer.Option(help="Write report.json and report.html to this directory.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Find the first place where the models part, and why: module by module along the data path."""
    console.quiet_libraries()
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    from mcore_qwen3vl.parity.case import Case
    from mcore_qwen3vl.report.write import write_report
    from mcore_qwen3vl.runtime.parallel import Layout
    from mcore_qwen3vl.trace.input import from_prompt
    from mcore_qwen3vl.trace.run import trace
    from mcore_qwen3vl.trace.show import show_trace

    if image and prompt is None:
        raise BadInput("--image needs a --prompt that asks about it.")
    sizes = Layout.parse(layout)
    micro = None
    if prompt is not None:
        micro = from_prompt(hf, prompt, image or [], multiple=Case(layout=sizes).multiple)
    result = trace(
        hf, mcore, layout=sizes, micro=micro, batch=batch, gradients=gradients, timeout=timeout
    )
    if report is not None:
        write_report(result, report)
    if not console.emit_json(result.to_dict(), json):
        show_trace(result)
    require(result.ok, f"the models differ. {result.verdict}")
