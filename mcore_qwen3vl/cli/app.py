"""The command line's root: groups of commands, the single commands, and exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from mcore_qwen3vl import __version__, console, machine
from mcore_qwen3vl.cli import convert, data, options, training, verify
from mcore_qwen3vl.cli.inference import generate, score
from mcore_qwen3vl.cli.inspect import inspect
from mcore_qwen3vl.errors import BadInput, CheckFailed, Unfinished
from mcore_qwen3vl.files import new_folder, refuse_undecodable
from mcore_qwen3vl.safe_path import protect_children

if TYPE_CHECKING:
    from mcore_qwen3vl.demos import DemoStep

_UsageError: Any = typer.BadParameter.__base__  # Typer has its own click, but not all its names

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(convert.app, name="convert")
app.add_typer(convert.lora, name="lora")
app.add_typer(verify.app, name="verify")
app.add_typer(data.app, name="data")
app.add_typer(training.launch, name="launch")
app.command("inspect")(inspect)
app.command("generate")(generate)
app.command("score")(score)
_FORWARDS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("rehearse", context_settings=_FORWARDS)(training.rehearse)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code.

    With ``--json`` an error is also JSON, on standard output, and not repeated on standard error:
    ``{"error": TEXT, "exit_code": N}``.
    """
    wants_json = "--json" in (sys.argv if arguments is None else arguments)
    protect_children()
    console.json_was_written.set(False)
    console.prepare_standard_streams()
    machine.warn_of_versions()
    try:
        refuse_undecodable(sys.argv if arguments is None else arguments)
        with console.name_slow_imports():
            result = app(arguments, standalone_mode=not wants_json)
        sys.exit(result or 0)
    except _UsageError as error:  # only with --json; otherwise Typer prints it itself
        _exit_with_error(error.format_message(), BadInput.exit_code, wants_json)
    except (BadInput, CheckFailed) as error:
        _exit_with_error(str(error), error.exit_code, wants_json)
    except ModuleNotFoundError as error:  # this command needs a larger installation
        if str(error.name).startswith("mcore_qwen3vl"):
            raise
        problem = (
            f"this command needs {error.name}, which is not installed. docs/installation.md says "
            "what a small installation can do; pip install mcore-qwen3vl brings the rest."
        )
        _exit_with_error(problem, BadInput.exit_code, wants_json)
    except Unfinished as error:
        trace = Path(tempfile.gettempdir()) / f"mcore-qwen3vl-{os.getpid()}.txt"
        trace.write_text(str(error), encoding="utf-8")
        said = f"{error.summary.rstrip('.')}. Details: {trace}"
        _exit_with_error(said, error.exit_code, wants_json)
    except OSError as error:  # from the disk, where no command could say more
        _exit_with_error(str(error), BadInput.exit_code, wants_json)
    except KeyboardInterrupt:
        console.messages.print("interrupted")
        sys.exit(130)


def _exit_with_error(error: str, code: int, wants_json: bool) -> NoReturn:
    """Print the error and exit; with ``--json``, print none after a result that was written."""
    if not wants_json:
        console.messages.print(f"[bold red]error:[/] {console.plain(error)}", soft_wrap=True)
    elif not console.json_was_written.get():
        console.emit_json({"error": error, "exit_code": code})
    sys.exit(code)


def _show_version(asked: bool) -> None:
    if asked:
        console.output.print(f"mcore-qwen3vl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Qwen3-VL on Megatron-Core: convert, verify, train."""


@app.command("tiny")
def tiny(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.")],
    family: Annotated[
        Literal["qwen3-vl", "qwen3.5"], typer.Option(help="The models to resemble.")
    ] = "qwen3-vl",
    moe: Annotated[bool, typer.Option("--moe", help="Mixture of experts, not dense.")] = False,
    tie: Annotated[bool, typer.Option("--tie", help="Tie embedding and head.")] = False,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="The language model alone, without a tower; of qwen3.5."),
    ] = False,
    servable: Annotated[
        bool, typer.Option("--servable", help="Sizes that vLLM takes on the CPU: heads of 64.")
    ] = False,
    real_vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Qwen's own vocabulary of 151,936 rows, from qwen.tiktoken of the package "
            "dashscope.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    json: options.Json = False,
) -> None:
    """Write a tiny random checkpoint with tokenizer, processor and chat template."""
    console.quiet_libraries()
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.tiny import SERVABLE, TINY, read_vocabulary, write_tiny_checkpoint

    text = SERVABLE[family] if servable else None
    vocabulary = TINY if real_vocab is None else read_vocabulary(real_vocab)
    with new_folder(path) as partial:
        write_tiny_checkpoint(
            partial,
            family=family,
            moe=moe,
            tie=tie,
            text_only=text_only,
            seed=seed,
            text=text,
            vocabulary=vocabulary,
        )
    kind = "MoE" if moe else "dense"
    written = {"out": path, "family": family, "kind": kind, "text_only": text_only, "seed": seed}
    name = Architecture.from_hf(path).kind
    console.present(json, written, console.say, f"wrote a tiny {name} to {path}")


@app.command("demo")
def demo(
    dense: Annotated[
        bool, typer.Option("--dense", help="Use a dense model with tied embeddings, not MoE.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the checkpoints in this directory.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Convert a tiny Qwen3-VL both ways and compare it on four CPU processes."""
    console.quiet_libraries()
    from mcore_qwen3vl.demos import convert_demo

    with console.messages.status("starting") as status:
        steps = convert_demo(dense=dense, keep=keep, status=status.update)
    ok = all(step.ok is not False for step in steps)
    console.present(json, {"ok": ok, "steps": list(map(asdict, steps))}, _show_demo, steps)
    options.require(ok, "the demo failed: see its results above.")


app.command("train", context_settings=_FORWARDS, add_help_option=False)(training.train)
app.command("train-demo")(training.train_demo)


def _show_demo(steps: list[DemoStep]) -> None:
    marks = {None: "", True: "[green]ok[/]", False: "[bold red]WRONG[/]"}
    rows = [(s.name, console.plain(s.result), marks[s.ok], f"{s.seconds:.1f} s") for s in steps]
    title = "Qwen3-VL: Hugging Face to Megatron-Core and back"
    console.output.print(console.table(title, "step", "result", "", ">time", rows=rows))
