"""``mcore-qwen3vl launch``, ``rehearse``, ``train`` and ``train-demo``: what starts training."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli.options import Json, require
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import new_folder
from mcore_qwen3vl.launch import catalogue

launch = typer.Typer(help="Scripts that start training on a cluster.", no_args_is_help=True)


@launch.command("list")
def list_scripts(json: Json = False) -> None:
    """Name every script, and what it is for."""
    scripts = catalogue.scripts().items()
    entries = [{"name": n, "file": s.name, "what": _title_of_script(s)} for n, s in scripts]
    rows = [(entry["name"], console.plain(entry["what"])) for entry in entries]
    console.present(
        json, entries, console.output.print, console.table("", "name", "what", rows=rows)
    )
    if not json:
        console.say("launch show NAME prints one; launch copy DIR writes all of them to DIR.")


@launch.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A script's name, as `launch list` prints it.")],
) -> None:
    """Print a script."""
    script = catalogue.find(name)
    if script is None:
        raise BadInput(
            f"There is no script {name}. The scripts are {', '.join(catalogue.scripts())}."
        )
    print(script.read_text(encoding="utf-8"), end="")


@launch.command("copy")
def copy(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    json: Json = False,
) -> None:
    """Write all scripts to a directory, to be changed and run there."""
    with new_folder(path) as partial:
        for file in sorted(catalogue.FOLDER.iterdir()):
            if file.suffix in (".sh", ".yaml") or file.name == "train.py":
                shutil.copy(file, partial)
    scripts = list(catalogue.scripts())
    said = f"{len(scripts)} scripts in {path}; bash {path / 'sft_2b.sh'} --dry-run prints a command"
    console.present(json, {"out": path, "scripts": scripts}, console.say, said)


def _title_of_script(script: Path) -> str:
    """Return a script's first comment, which says what it is for."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return next(x for x in lines if x.startswith("# ")).removeprefix("# ")


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
            help="Only print the memory of each pipeline stage and the size of checkpoints by a "
            "formula, which takes a second; for bf16 with the distributed optimizer.",
        ),
    ] = False,
    disk_gb_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="GB",
            help="With --estimate: speed of the shared file system, to say how long a checkpoint "
            "takes.",
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="N",
            help="Tokens of the whole training without padding, such as 100e9: say its days and "
            "GPU-hours by the modelled step.",
        ),
    ] = None,
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
    if disk_gb_per_s is not None and not estimate:
        raise BadInput("--disk-gb-per-s is for --estimate: add it, or drop --disk-gb-per-s.")
    if tokens is not None and not math.isfinite(tokens):
        raise BadInput(f"--tokens is {tokens}: give a number, such as 100e9.")
    if estimate and tokens is not None:
        raise BadInput("--estimate models no step, whose time --tokens needs: drop one of them.")
    if fit and report is not None:
        raise BadInput(
            "--fit and --report cannot be combined: --report writes a page about one layout. "
            "Choose a row of --fit, then rehearse that row with --report."
        )
    from mcore_qwen3vl.rehearsal.command import read_command

    command = read_command(context.args, gpus)  # before the imports below, which take seconds
    console.quiet_libraries()
    from mcore_qwen3vl.rehearsal.rehearse import Options, Rehearser, checked_architecture
    from mcore_qwen3vl.rehearsal.report import (
        print_estimate,
        print_fits,
        print_rehearsal,
        write_page,
    )
    from mcore_qwen3vl.rehearsal.search import (
        checkpoint_size,
        memory_of_stages,
        search,
        suggest_remedies,
        trained_counts,
    )
    from mcore_qwen3vl.rehearsal.step_time import Constants
    from mcore_qwen3vl.runtime.gpus import find_gpu

    kinds = tuple(word.strip() for word in roles.split(","))
    assumed = Constants() if constants is None else Constants.from_file(constants)
    options = Options(find_gpu(gpu), memory_gib, allowance_gib, kinds, routing, assumed, tokens)
    architecture = checked_architecture(command) if not fit else command.line.architecture
    if estimate:
        trained = trained_counts(command, architecture)
        stages = memory_of_stages(command, architecture, trained)
        print_estimate(
            command,
            architecture,
            stages,
            checkpoint_size(command, architecture, stages, trained),
            disk_gb_per_s=disk_gb_per_s,
            json=json,
        )
        return
    if fit:
        with console.progress("searching") as say, Rehearser(options, say) as rehearser:
            fits = search(rehearser, command, architecture)
        console.present(json, [fitting.to_dict() for fitting in fits], print_fits, fits, command)
        require(any(fitting.good for fitting in fits), "none of the rehearsed layouts fits.")
        return
    with console.progress("rehearsing") as say, Rehearser(options, say) as rehearser:
        rehearsal = rehearser.rehearse(command)
        if suggest:
            rehearsal.remedies = suggest_remedies(rehearser, command, rehearsal)
    if report is not None:
        write_page(rehearsal, report)
    console.present(json, rehearsal.to_dict(), print_rehearsal, rehearsal)
    require(rehearsal.fits, rehearsal.verdict)


def train(
    context: typer.Context,
    processes: Annotated[
        int | None,
        typer.Option(help="Number of ranks; default: one for each GPU, or one on the CPU."),
    ] = None,
) -> None:
    """Train on this machine: forwards every other flag to Megatron's loop through torchrun."""
    from mcore_qwen3vl.training.arguments.help import help_words
    from mcore_qwen3vl.training.local import show_help, train_locally

    words = help_words(context.args)
    if words is None:
        sys.exit(train_locally(context.args, processes))
    show_help(words)


def train_demo(
    keep: Annotated[Path | None, typer.Option(help="Keep the files in this directory.")] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train an adapter, and generate with PEFT.")
    ] = False,
) -> None:
    """Train a tiny model on image questions on the CPU, stop, resume, export, ask it."""
    console.quiet_libraries()
    from mcore_qwen3vl.demos import train_demo as run

    result = run(keep=keep, say=console.say, lora=lora)
    console.output.print(
        f"loss {result.first_loss:.3f} to {result.last_loss:.4f}, resumed at step "
        f"{result.resumed_at}, {result.answered} of {result.asked} questions answered, "
        f"{result.seconds:.0f} s"
    )
