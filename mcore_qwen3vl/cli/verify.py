"""``mcore-qwen3vl verify``: check that two things are the same."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import JsonFile, ReportFolder, Size, Workers, require
from mcore_qwen3vl.cli.trace import verify_trace

app = typer.Typer(help="Check that two things are the same.", no_args_is_help=True)
app.command("trace")(verify_trace)


@app.command("roundtrip")
def verify_roundtrip(
    src: Annotated[Path, sources.argument("SRC", "Hugging Face checkpoint directory or hub id.")],
    work_dir: Annotated[
        Path | None, typer.Option(help="Room for twice the checkpoint; default: the system's.")
    ] = None,
    workers: Workers = None,
    report: ReportFolder = None,
    json: JsonFile = None,
) -> None:
    """Hugging Face to Megatron-Core and back, bitwise: every tensor and sidecar file."""
    from mcore_qwen3vl.converters.roundtrip import roundtrip

    result = roundtrip(src, work_dir, console.byte_progress, workers=workers)
    _write_report(result.comparison, report)
    if not console.emit_json({"ok": result.ok, **asdict(result)}, json):
        console.show_comparison(result.comparison)
    require(result.ok, f"the round trip of {src} is not exact.")


@app.command("tensors")
def verify_tensors(
    a: Annotated[
        Path, sources.argument("A", "A checkpoint, Hugging Face (or hub id) or Megatron-Core.")
    ],
    b: Annotated[Path, sources.argument("B", "Another one.")],
    report: ReportFolder = None,
    json: JsonFile = None,
) -> None:
    """Compare two checkpoints bitwise as Hugging Face tensors."""
    from mcore_qwen3vl.converters.compare import compare_checkpoints

    with console.byte_progress("comparing") as progress:
        comparison = compare_checkpoints(a, b, progress=progress)
    _write_report(comparison, report)
    if not console.emit_json({"ok": comparison.ok, **asdict(comparison)}, json):
        console.show_comparison(comparison)
    require(comparison.ok, f"{a} and {b} differ.")


@app.command("parity")
def verify_parity(
    hf: Annotated[Path, sources.argument("HF", "Hugging Face checkpoint directory or hub id.")],
    tp: Size = 1,
    sp: Annotated[
        bool, typer.Option("--sp", help="Sequence parallelism, over the TP ranks.")
    ] = False,
    pp: Size = 1,
    vpp: Size = 1,
    ep: Size = 1,
    etp: Size = 1,
    cp: Size = 1,
    dp: Size = 1,
    batches: Annotated[
        str | None, typer.Option(help="Comma-separated kinds of batches; default: all of them.")
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Compare gradients and an AdamW step.")] = True,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of both models.")] = "fp32",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where ours runs.")] = "cpu",
    spec: Annotated[
        Literal["torch", "te"], typer.Option(help="te: Transformer Engine, on CUDA.")
    ] = "torch",
    timeout: Annotated[float, typer.Option(help="Seconds for the ranks to finish.")] = 600.0,
    report: ReportFolder = None,
    json: JsonFile = None,
) -> None:
    """Logits, loss and every gradient under a parallel layout, against Hugging Face's model."""
    console.quiet_libraries()
    from mcore_qwen3vl.parity.report import render
    from mcore_qwen3vl.parity.verify import verify_parity as verify
    from mcore_qwen3vl.runtime.parallel import Layout

    result = verify(
        hf,
        Layout(tp=tp, sp=sp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp, dp=dp),
        None if batches is None else batches.split(","),
        gradients=gradients,
        dtype=dtype,
        device=device,
        spec=spec,
        timeout=timeout,
    )
    _write_report(result, report)
    if not console.emit_json(result.to_dict(), json):
        console.output.print(render(result))
    require(result.ok, f"{hf} is not the same model at this layout.")


def _write_report(result: Any, folder: Path | None) -> None:
    if folder is not None:
        from mcore_qwen3vl.report.write import write_report

        write_report(result, folder)
