"""Arguments and options that several commands share, and the end of a check.

A path that does not exist is refused while the command line is read, before torch is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.arguments import data_flags

if TYPE_CHECKING:
    from mcore_qwen3vl.verify.report import Report


def source(metavar: str, help: str) -> Any:
    """Return an argument for a checkpoint, whose weights are downloaded if needed."""
    return typer.Argument(metavar=metavar, help=help, parser=_checkpoint)


def config(help: str) -> Any:
    """Return an option for a checkpoint's config, tokenizer and processor, without its weights."""
    return typer.Option(metavar="DIR", help=help, parser=_config)


def weights(help: str, metavar: str = "ADAPTER") -> Any:
    """Return an option for an adapter or a checkpoint, which is downloaded if needed."""
    return typer.Option(metavar=metavar, help=help, parser=_checkpoint)


def data_set(help: str) -> Any:
    """Return an argument for a data set of any kind."""
    return typer.Argument(metavar="DATA", help=help, parser=_data_set)


def _checkpoint(name: str, *, weights: bool = True) -> Path:
    from mcore_qwen3vl.converters.hf.hub import resolve

    path = resolve(name, weights=weights)
    if not path.exists():
        raise BadInput(f"{path} does not exist: check the path, or name a hub id, OWNER/NAME.")
    return path


def _config(name: str) -> Path:
    return _checkpoint(name, weights=False)


def _data_set(name: str) -> Path:
    from mcore_qwen3vl.data.loading.sources import require_data_set

    return require_data_set(Path(name))


Force = Annotated[bool, typer.Option("--force", help="Replace the target if it exists.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit code 1 and nothing written if a value is NaN or infinite."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result, or the error, as JSON and nothing else.")
]
ReportFolder = Annotated[
    Path | None,
    typer.Option("--report", help="Write report.html, report.json and junit.xml to this folder."),
]
Dtype = Annotated[
    Literal["config", "bf16", "fp16", "fp32"],
    typer.Option(help="Dtype of weights and computation; config: as the checkpoint's config says."),
]
Spec = Annotated[
    Literal["torch", "te"], typer.Option(help="Layer spec; te needs Transformer Engine and a GPU.")
]
ConfigSource = Annotated[
    Path | None, config("Directory or hub id of config and processor, if the checkpoint has none.")
]
Checkpoint = Annotated[
    Path, source("CHECKPOINT", "Megatron-Core or Hugging Face directory, or hub id.")
]
Timeout = Annotated[float, typer.Option(help="Time limit for the ranks, in seconds.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Run on the CPU, one process for each rank.")]
Workers = Annotated[
    int | None, typer.Option(help="Parallel workers; the default suits the machine.")
]

_PANEL = "Layout, all sizes 1 unless given"
_SIZES = {
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "vpp": "virtual pipeline",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
    "cp": "context parallel",
    "dp": "data parallel",
}
_LAYOUT_FLAGS: dict[str, Any] = {
    name: Annotated[
        int | None,
        typer.Option(
            f"--{name}",
            min=1,
            metavar="N",
            help=f"{what.capitalize()} size.",
            rich_help_panel=_PANEL,
        ),
    ]
    for name, what in _SIZES.items()
} | {
    "sp": Annotated[
        bool | None,
        typer.Option("--sp/--no-sp", help="Sequence parallelism.", rich_help_panel=_PANEL),
    ]
}


def layout_flags(
    make: Callable[..., Layout] = Layout, *, without: Collection[str] = ()
) -> Callable[[Any], Any]:
    """Give a command the flags ``--tp --pp --vpp --ep --etp --cp --dp --sp``.

    The command itself takes a keyword argument `layout` instead: what `make` returns.
    """
    offered = {name: flag for name, flag in _LAYOUT_FLAGS.items() if name not in without}
    return _flags_for("layout", offered, make)


def help_of(name: str) -> str:
    """Return training's help of a flag for data as a sentence."""
    text = data_flags.TEXTS[name]
    return f"{text[0].upper()}{text[1:]}."


def media_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command training's flags for the budgets of images and videos.

    The command itself takes a keyword argument `media`.
    """
    flags: dict[str, Any] = {}
    for field in fields(MediaLimits):
        option = typer.Option(
            f"--{field.name.replace('_', '-')}",
            metavar="N",
            help=help_of(field.name),
            rich_help_panel="Budgets, as for training",
        )
        kind = float if field.name.endswith("fps") else int
        flags[field.name] = Annotated[kind | None, option]
    return _flags_for("media", flags, MediaLimits)(command)


def _flags_for(
    argument: str, offered: dict[str, Any], make: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Return a decorator that offers flags for `argument`, which is `make` of those given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(**options: Any) -> None:
            values = {name: options.pop(name) for name in offered}
            given = {name: value for name, value in values.items() if value is not None}
            command(**options, **{argument: make(**given)})

        own = inspect.signature(command, eval_str=True)
        flags = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)
            for name, flag in offered.items()
        ]
        kept = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in own.parameters.items()
            if name != argument
        ]
        signature = own.replace(parameters=[*kept, *flags])
        with_flags.__signature__ = signature  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return with_flags

    return decorate


def require(held: bool, otherwise: str) -> None:
    """Exit with code 1 and a message unless a check held."""
    if not held:
        raise CheckFailed(otherwise)


def conclude(report: Report, folder: Path | None, json: bool) -> None:
    """End a ``verify`` command: write the files, show the report, and exit by its verdict."""
    from mcore_qwen3vl.verify.report import render
    from mcore_qwen3vl.verify.report_page import write_report

    if folder is not None:
        write_report(report, folder)
    console.present(json, report.to_dict(), lambda: console.output.print(render(report)))
    if not report.ok:
        raise typer.Exit(CheckFailed.exit_code)
