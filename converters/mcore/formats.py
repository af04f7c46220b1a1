"""The registry of Megatron checkpoint formats, each of which has its own folder.

Code that reads a Megatron checkpoint asks this module and names no format itself.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import is_huggingface
from mcore_qwen3vl.converters.mapping.dialects import maker_of
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import (
    MegatronCheckpoint,
    TranslatedCheckpoint,
    stacked,
)
from mcore_qwen3vl.converters.mcore.paths import (
    TRACKER,
    folder_name,
    iteration_folder,
    swift_adapter,
    swift_checkpoint,
    tracked,
    verl_huggingface,
    verl_step,
    verl_weights,
)
from mcore_qwen3vl.errors import BadInput

DEFAULT = "torch_dist"

# Each module has a FORMAT. They are imported by name, since they themselves import this package.
# To drop a format, remove its folder and its line here.
MODULES = (
    "mcore_qwen3vl.converters.legacy",
    "mcore_qwen3vl.converters.torch_dist",
)


@dataclass(frozen=True)
class Format:
    """One format of Megatron checkpoints.

    Attributes:
        name: its value of Megatron's ``--ckpt-format``.
        title: its name in messages.
        recognises: tells whether an iteration's folder has this format, by its files' names.
        open: opens the checkpoint at a path (its directory, or the folder of one iteration) of a
            model with the given architecture.
        plan: ``plan(source, layout, spec, *, dtype, make_vocab_size_divisible_by)`` plans a
            conversion to a format that loads under one layout only; see
            `convert.plan_hf_to_mcore`. None if the format loads under any layout.
        check_run: ``check_run(folder, args)`` raises BadInput if a run with Megatron's arguments
            `args` could not load the checkpoint in `folder`.
    """

    name: str
    title: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Architecture], MegatronCheckpoint]
    plan: Callable[..., Any] | None = None
    check_run: Callable[[Path, Namespace], None] = lambda folder, args: None


@cache
def formats() -> dict[str, Format]:
    """Return every known format, by name."""
    found = (import_module(module).FORMAT for module in MODULES)
    return {format.name: format for format in found}


def named(name: str) -> Format:
    """Return the format with this name; raise BadInput if there is none."""
    if name not in formats():
        raise BadInput(
            f"checkpoint format {name!r} is not known here; {' and '.join(sorted(formats()))} "
            f"can be written. {DEFAULT} loads under any layout."
        )
    return formats()[name]


def format_of(path: Path) -> Format:
    """Return the format of a Megatron checkpoint or of one iteration; `DEFAULT` if none matches.

    Raises:
        BadInput: the tracker is unreadable or names an iteration that does not exist.
    """
    folder = iteration_folder(path)
    return next((f for f in formats().values() if f.recognises(folder)), formats()[DEFAULT])


def open_megatron(path: Path, architecture: Architecture) -> MegatronCheckpoint:
    """Open the checkpoint or iteration at `path`, whatever its format and whoever wrote it.

    Raises:
        BadInput: the checkpoint has no known format, is damaged or incomplete, or has the keys of
            an unknown maker.
    """
    format = format_of(path)
    stored = format.open(path, architecture)
    if format.plan is not None:
        require_own_keys(stored.folder, stored.index.tensors)
        return stored
    dialect = maker_of(stored.folder, stored.index.tensors)
    if dialect is None:
        return stored
    return TranslatedCheckpoint(
        stacked(stored, dialect, architecture), dialect, architecture.vision
    )


def require_own_keys(folder: Path, keys: Iterable[str]) -> None:
    """Raise BadInput if a checkpoint written for one layout has another maker's keys, `keys`."""
    dialect = maker_of(folder, keys)
    if dialect is not None:
        raise BadInput(
            f"{folder} has the keys of {dialect.maker} and is of {format_of(folder).title}, in "
            f"which they are not read. Save it there with --ckpt-format {DEFAULT}."
        )


def is_megatron(path: Path) -> bool:
    """Return whether `path` looks like a Megatron checkpoint or one iteration of it.

    ms-swift writes a tracker beside Hugging Face weights, with or without Megatron's.

    Raises:
        BadInput: there are Hugging Face weights, and the tracker beside them is unreadable.
    """
    if _is_recognised(verl_weights(path)):
        return True
    if not (path / TRACKER).is_file():
        return False
    newest = tracked(path)
    return not is_huggingface(path) or (
        newest is not None and _is_recognised(path / folder_name(newest))
    )


def _is_recognised(folder: Path) -> bool:
    return any(format.recognises(folder) for format in formats().values())


def require_directory(path: str | Path) -> Path:
    """Return `path`; raise BadInput if it is not a directory."""
    path = Path(path)
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory. Check the path.")
    return path


def require_huggingface(
    path: Path, *, instead: str = "`mcore-qwen3vl convert mcore-to-hf` makes one of it"
) -> None:
    """Raise BadInput if `path` is a Megatron checkpoint; the message says what to do `instead`."""
    if is_megatron(path):
        raise BadInput(
            f"{path} is a Megatron-Core checkpoint, but a Hugging Face one is needed here: "
            f"{instead}."
        )


def refuse_other_folders(path: Path) -> None:
    """Raise BadInput if `path` is a folder of another maker's that is no whole checkpoint.

    The message names the folder to use: VERL's Hugging Face weights, where it saved no others; the
    newest checkpoint of ms-swift's run; or the adapter that ms-swift trained.
    """
    step = verl_step(path)
    if not is_megatron(step) and (weights := verl_huggingface(step)):
        raise BadInput(
            f"{path} was saved by VERL, and its weights are a Hugging Face checkpoint already: "
            f"name {weights}."
        )
    if not is_checkpoint(path) and (newest := swift_checkpoint(path)):
        raise BadInput(
            f"{path} is a run of ms-swift's, whose checkpoints are below: name {newest}."
        )
    if adapter := swift_adapter(path):
        raise BadInput(
            f"{path} holds an adapter that ms-swift trained, and no base weights: use `generate "
            f"BASE --lora {adapter}` or `lora merge BASE {adapter} OUT`."
        )


def require_megatron(
    path: Path, *, instead: str = "`mcore-qwen3vl convert hf-to-mcore` makes one of it"
) -> None:
    """Raise BadInput if `path` is a Hugging Face checkpoint; the message ends in `instead`."""
    refuse_other_folders(path)
    if is_huggingface(path) and not is_megatron(path):
        raise BadInput(
            f"{path} is a Hugging Face checkpoint, but a Megatron-Core one is needed here: "
            f"{instead}."
        )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` looks like a Megatron or a Hugging Face checkpoint."""
    return is_megatron(path) or is_huggingface(path)
