"""``mcore-qwen3vl rehearse``: find out without its GPUs whether a training run starts and fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli.options import Json, require
from mcore_qwen3vl.errors import BadInput


def rehearse(
    context: typer.Context,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", metavar="N", help="Number of GPUs of the whole run; default: the script's."
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="KIND",
            help="a100-40gb, a100-80gb, h100-80gb, h200-141gb or b200-180gb, or the beginning "
            "of a name.",
        ),
    ] = "h100-80gb",
    roles: Annotated[
        str, typer.Option(help="all, or some of first,middle,last: pipeline stages to rehearse.")
    ] = "all",
    routing: Annotated[
        Literal["uniform", "skewed"],
        typer.Option(help="skewed: a quarter of the experts get 2.5 times their share of tokens."),
    ] = "uniform",
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of the GPU; default: that of --gpu.")
    ] = None,
    allowance_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Part of that memory for the CUDA context and NCCL; default: estimated from "
            "the layout.",
        ),
    ] = None,
    suggest: Annotated[
        bool, typer.Option(help="If it does not fit, rehearse similar settings until some fit.")
    ] = True,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Rehearse the run's layout and others for these GPUs until three fit; not with "
            "--report.",
        ),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Only print the memory of each pipeline stage by a formula, which takes a second; "
            "for bf16 with the distributed optimizer.",
        ),
    ] = False,
    constants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON with assumptions of the modelled step time, e.g. launch_us; see the docs.",
        ),
    ] = None,
    json: Json = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Write an HTML page with the memory over time."
        ),
    ] = None,
) -> None:
    """Run two training iterations on a simulated GPU: memory, launches, traffic, modelled time.

    After the options, name a launch script (its path, or its name in `launch list`) and the flags
    to append, or give the flags of train. A --hf-model that holds only a config.json is enough.
    Exit code 0: it fits; 1: it does not fit or stops with an error; 2: the command cannot be used.
    """
    if estimate and (fit or report is not None):
        raise BadInput("--estimate rehearses nothing: drop it, or --fit and --report.")
    if fit and report is not None:
        raise BadInput(
            "--fit and --report cannot be combined: --report writes a page about one layout. "
            "Choose a row of --fit, then rehearse that row with --report."
        )
    from mcore_qwen3vl.rehearsal.command import read_command

    command = read_command(context.args, gpus)  # before the imports below, which take seconds
    console.quiet_libraries()
    from mcore_qwen3vl.rehearsal.page import write_page
    from mcore_qwen3vl.rehearsal.rehearse import Options, Rehearser, checked
    from mcore_qwen3vl.rehearsal.search import estimate_stages, search, suggest_remedies, trained_of
    from mcore_qwen3vl.rehearsal.step_time import Constants
    from mcore_qwen3vl.rehearsal.terminal import show, show_estimate, show_fits
    from mcore_qwen3vl.runtime.gpus import find_gpu

    kinds = tuple(word.strip() for word in roles.split(","))
    assumed = Constants() if constants is None else Constants.read(constants)
    options = Options(find_gpu(gpu), memory_gib, allowance_gib, kinds, routing, assumed)
    architecture = checked(command) if not fit else command.line.architecture
    if estimate:
        stages = estimate_stages(command, architecture, trained_of(command, architecture))
        show_estimate(command, architecture, stages, json=json)
        return
    if fit:
        with console.progress("searching") as say, Rehearser(options, say) as rehearser:
            fits = search(rehearser, command, architecture)
        console.present(json, [fitting.to_dict() for fitting in fits], show_fits, fits, command)
        require(any(fitting.good for fitting in fits), "none of the rehearsed layouts fits.")
        return
    with console.progress("rehearsing") as say, Rehearser(options, say) as rehearser:
        rehearsal = rehearser.rehearse(command)
        if suggest:
            rehearsal.remedies = suggest_remedies(rehearser, command, rehearsal)
    if report is not None:
        write_page(rehearsal, report)
    console.present(json, rehearsal.to_dict(), show, rehearsal)
    require(rehearsal.fits, rehearsal.verdict)
