"""Arguments and options that several commands share, and the end of a check.

A path that does not exist is refused while the command line is read, before torch is imported.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from mcore_qwen3vl.data.config import MEDIA_BUDGETS, DataConfig, MediaLimits, require_data_set
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.flags import field_docs
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.settings.run import DataSources


def source(metavar: str, help: str) -> Any:
    """Return an argument for a checkpoint, whose weights are downloaded if needed."""
    return typer.Argument(metavar=metavar, help=help, parser=_resolve_checkpoint)


def config(help: str) -> Any:
    """Return an option for a checkpoint's config, tokenizer and processor, without its weights."""
    return typer.Option(metavar="DIR", help=help, parser=_resolve_config)


def weights(help: str, metavar: str = "ADAPTER") -> Any:
    """Return an option for an adapter or a checkpoint, which is downloaded if needed."""
    return typer.Option(metavar=metavar, help=help, parser=_resolve_checkpoint)


def data_set(help: str) -> Any:
    """Return an argument for a data set of any kind."""
    return typer.Argument(metavar="DATA", help=help, parser=_require_data_set)


def _resolve_checkpoint(name: str, *, weights: bool = True) -> Path:
    from mcore_qwen3vl.converters.identify import resolve
    from mcore_qwen3vl.converters.storage.staging import work_folder

    path = resolve(name, weights=weights)
    if not path.exists() and (work := work_folder(path.absolute())).exists():
        raise BadInput(
            f"{path} is not written yet: {work} holds what a command that has not ended has done. "
            "Wait for it, run it again, or do the parts that are missing."
        )
    if not path.exists():
        raise BadInput(f"{path} does not exist: check the path, or name a hub id, OWNER/NAME.")
    return path


def _resolve_config(name: str) -> Path:
    return _resolve_checkpoint(name, weights=False)


def _require_data_set(name: str) -> Path:
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
Spec = Annotated[
    Literal["torch", "te"], typer.Option(help="Layer spec; te needs Transformer Engine and a GPU.")
]
Workers = Annotated[
    int | None, typer.Option(help="Parallel workers; the default suits the machine.")
]

_LAYOUT = "Layout, all sizes 1 unless given"
_SIZES = {
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "vpp": "virtual pipeline",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
    "cp": "context parallel",
    "dp": "data parallel",
}


def layout_flags(
    make: Callable[..., Any] = Layout, *, without: Collection[str] = ()
) -> Callable[[Any], Any]:
    """Give a command the flags ``--tp --pp --vpp --ep --etp --cp --dp --sp``, and uneven stages.

    The command itself takes an argument `layout` instead: what `make` returns.
    """
    panel: Any = {"rich_help_panel": _LAYOUT, "metavar": "N", "min": 1}
    flags = [
        _flag_parameter(name, int | None, f"{what.capitalize()} size.", **panel)
        for name, what in _SIZES.items()
    ]
    for end in ("first", "last"):
        spelt = f"--decoder-{end}-pipeline-num-layers"
        flags.append(
            _flag_parameter(end, int | None, f"Layers of the {end} pipeline stage.", spelt, **panel)
        )
    sp = _flag_parameter(
        "sp", bool | None, "Sequence parallelism.", "--sp/--no-sp", rich_help_panel=_LAYOUT
    )
    return _flag_adder(
        [flag for flag in [*flags, sp] if flag.name not in without],
        lambda command, arguments, values: command(**arguments, layout=make(**values)),
        filled="layout",
    )


def data_flags(*names: str) -> Callable[[Any], Any]:
    """Give a command training's flags for these fields of the data config, and for media budgets.

    The command gets them as one argument `reading`: the fields by name, and `media_limits`.
    """
    defaults = {field.name: field.default for field in fields(DataConfig)}
    kinds = get_type_hints(DataConfig) | get_type_hints(MediaLimits)
    panel: Any = {"rich_help_panel": "Budgets, as for training", "metavar": "N"}
    flags = [
        _flag_parameter(name, kinds[name], help_of(name), default=defaults[name]) for name in names
    ]
    flags += [_flag_parameter(name, kinds[name], help_of(name), **panel) for name in MEDIA_BUDGETS]

    def call(command: Callable[..., Any], arguments: dict[str, Any], values: dict[str, Any]) -> Any:
        limits = MediaLimits(**{name: values.pop(name) for name in MEDIA_BUDGETS if name in values})
        return command(**arguments, reading={**values, "media_limits": limits})

    return _flag_adder(flags, call, filled="reading")


def then(use: Callable[..., None]) -> Callable[[Any], Any]:
    """Make a command of a function with a result, and of `use`, which calls it.

    The command has the arguments and the flags of both, except for the first argument of `use`: a
    call of the function, without arguments.
    """
    flags = list(signature(use).parameters.values())[1:]
    return _flag_adder(
        flags, lambda command, arguments, values: use(partial(command, **arguments), **values)
    )


def help_of(name: str) -> str:
    """Return training's help of a flag for data as a sentence."""
    text = {**field_docs(DataSources), **field_docs(DataConfig), **field_docs(MediaLimits)}[name]
    return f"{text[0].upper()}{text[1:]}."


def _flag_parameter(
    name: str, kind: Any, help: str, spelt: str = "", *, default: Any = None, **option: Any
) -> Parameter:
    declared = typer.Option(spelt or f"--{name.replace('_', '-')}", help=help, **option)
    annotation = Annotated[kind, declared]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_adder(
    flags: Sequence[Parameter], call: Callable[..., Any], *, filled: str = ""
) -> Callable[[Any], Any]:
    """Return a decorator that adds flags to a function.

    The result calls ``call(function, own, given)`` with the function's own arguments, and with
    those of `flags` that have a value. Its argument `filled` is not read from the command line.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_flags(**arguments: Any) -> Any:
            values = {flag.name: arguments.pop(flag.name) for flag in flags}
            return call(
                command,
                arguments,
                {name: value for name, value in values.items() if value is not None},
            )

        named = [p for p in signature(command).parameters.values() if p.name != filled]
        keywords = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*named, *flags)]
        with_flags.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in keywords}
        return with_flags

    return decorate


def require(condition: bool, otherwise: str) -> None:
    """Exit with code 1 and a message unless a check held."""
    if not condition:
        raise CheckFailed(otherwise)
