"""The formats of Megatron checkpoints that are known here, each in a folder of its own.

Whatever reads a Megatron checkpoint asks here, and needs no word about one format or another.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.checkpoint import is_huggingface
from mcore_qwen3vl.converters.mcore.checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.mcore.paths import TRACKER, iteration_folder
from mcore_qwen3vl.errors import BadInput

DEFAULT = "torch_dist"

# Each has a FORMAT. Named rather than imported: they build on this package. To do without one,
# remove its folder and its line here.
MODULES = (
    "mcore_qwen3vl.converters.legacy.format",
    "mcore_qwen3vl.converters.torch_dist.format",
)


@dataclass(frozen=True)
class PerLayout:
    """What only a format has that is written for one parallel layout and loads under no other.

    Attributes:
        plan: ``plan(source, layout, spec, *, dtype, make_vocab_size_divisible_by)`` lays out the
            conversion of a Hugging Face checkpoint; see `convert.plan_hf_to_mcore`.
        check_run: ``check_run(folder, args)`` refuses a run with Megatron's arguments `args` that
            could not load the checkpoint in `folder`.
    """

    plan: Callable[..., Any]
    check_run: Callable[[Path, Namespace], None]


@dataclass(frozen=True)
class Format:
    """One format of Megatron checkpoints.

    Attributes:
        name: what Megatron's ``--ckpt-format`` calls it.
        title: what a sentence calls it.
        recognises: whether the folder of an iteration is of this format, by its files' names.
        open: the checkpoint at a path (its directory, or the folder of one iteration), of the
            model that the architecture describes.
        per_layout: None for a format that loads under any layout.
    """

    name: str
    title: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, Architecture], MegatronCheckpoint]
    per_layout: PerLayout | None = None


@cache
def formats() -> dict[str, Format]:
    """Every known format, by name."""
    found = (import_module(module).FORMAT for module in MODULES)
    return {format.name: format for format in found}


def named(name: str) -> Format:
    """
    Raises:
        BadInput: no format has this name.
    """
    if name not in formats():
        raise BadInput(
            f"checkpoint format {name!r} is not known here; {' and '.join(sorted(formats()))} "
            f"can be written. {DEFAULT} loads under any layout."
        )
    return formats()[name]


def format_of(path: Path) -> Format:
    """The format of a Megatron checkpoint or one iteration of it; `DEFAULT` if none fits.

    Raises:
        BadInput: its tracker is unreadable or names an iteration that is not there.
    """
    folder = iteration_folder(path)
    return next((f for f in formats().values() if f.recognises(folder)), formats()[DEFAULT])


def open_megatron(path: Path, architecture: Architecture) -> MegatronCheckpoint:
    """The checkpoint at `path`, in whatever format it is.

    Args:
        path: checkpoint directory, or the folder of one iteration.
        architecture: the model that it should be.

    Raises:
        BadInput: it is of no known format, damaged or incomplete.
    """
    return format_of(path).open(path, architecture)


def is_megatron(path: Path) -> bool:
    """Whether `path` looks like a Megatron checkpoint or one iteration of it."""
    return (path / TRACKER).is_file() or any(f.recognises(path) for f in formats().values())


def require_huggingface(
    path: Path, *, instead: str = "`mcore-qwen3vl convert mcore-to-hf` makes one of it"
) -> None:
    """
    Raises:
        BadInput: `path` is a Megatron checkpoint; the message says what to do `instead`.
    """
    if is_megatron(path):
        raise BadInput(
            f"{path} is a Megatron-Core checkpoint, but a Hugging Face one is needed here: "
            f"{instead}."
        )


def require_megatron(
    path: Path, *, instead: str = "`mcore-qwen3vl convert hf-to-mcore` makes one of it"
) -> None:
    """
    Raises:
        BadInput: `path` is a Hugging Face checkpoint; the message says what to do `instead`.
    """
    if is_huggingface(path) and not is_megatron(path):
        raise BadInput(
            f"{path} is a Hugging Face checkpoint, but a Megatron-Core one is needed here: "
            f"{instead}."
        )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` looks like a Megatron or a Hugging Face checkpoint."""
    return is_megatron(path) or is_huggingface(path)
