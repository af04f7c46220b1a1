"""The formats of Megatron checkpoints, and opening one of any format and maker.

Each format has its own module. Code that reads a checkpoint calls `open_megatron`, and names no
format itself.
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
from mcore_qwen3vl.converters.identify import DEFAULT_FORMAT, FORMATS, CheckpointPlace, identify
from mcore_qwen3vl.converters.mapping.dialects import HYBRID, HYBRID_NORM, dialect_of
from mcore_qwen3vl.converters.mapping.table import EMBEDDING
from mcore_qwen3vl.converters.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.other_keys import PairedLayers, TranslatedCheckpoint, stack_layers
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class CheckpointFormat:
    """One format of Megatron checkpoints.

    Attributes:
        name: its value of Megatron's ``--ckpt-format``.
        title: its name in messages.
        open: opens the checkpoint in an iteration's folder, of a model with the given architecture.
        plan: ``plan(source, layout, spec, *, dtype, make_vocab_size_divisible_by)`` plans a
            conversion to a format that loads under one layout only; see
            `to_mcore.plan_hf_to_mcore`. None if the format loads under any layout.
        check_run: ``check_run(folder, args)`` raises BadInput if a run with Megatron's arguments
            `args` could not load the checkpoint in `folder`.
    """

    name: str
    title: str
    open: Callable[[Path, Architecture], MegatronCheckpoint]
    plan: Callable[..., Any] | None = None
    check_run: Callable[[Path, Namespace], None] = lambda folder, args: None

    @property
    def one_layout(self) -> bool:
        """Whether a checkpoint loads under its own layout only."""
        return self.plan is not None


@cache
def formats() -> dict[str, CheckpointFormat]:
    """Return every known format, by name."""
    # Imported by name, since the modules themselves import this one.
    return {name: import_module(files.module).FORMAT for name, files in FORMATS.items()}


def format_named(name: str) -> CheckpointFormat:
    """Return the format with this name; raise BadInput if there is none."""
    if name not in formats():
        raise BadInput(
            f"checkpoint format {name!r} is not known here; {' and '.join(sorted(formats()))} "
            f"can be written. {DEFAULT_FORMAT} loads under any layout."
        )
    return formats()[name]


def format_of(place: CheckpointPlace) -> CheckpointFormat:
    """Return the format of a Megatron checkpoint, or the default one for anything else."""
    return formats()[place.format or DEFAULT_FORMAT]


def open_megatron(place: CheckpointPlace, architecture: Architecture) -> MegatronCheckpoint:
    """Open a checkpoint or iteration, whatever its format and whoever wrote it.

    Raises:
        BadInput: the checkpoint has no known format, is damaged or incomplete, has the keys of an
            unknown maker, or holds an adapter alone.
    """
    folder, format = place.weights(), format_of(place)
    stored = format.open(folder, architecture)
    if EMBEDDING not in stored.index.tensors:
        place.require_base()  # it may be a LoRA run's, which has no base weights
    if format.one_layout:  # only our own keys are read from it
        require_own_keys(folder, stored.index.tensors)
        return stored
    dialect = dialect_of(folder, stored.index.tensors)
    if dialect is None:  # the mapping table's own keys; `dialect_of` refuses an unknown maker's
        try:
            return stack_layers(stored, None, architecture)
        except BadInput:  # another model, or a layer is missing: who reads it names the tensor
            return stored
    dialect.require_architecture(architecture)
    if dialect.language + HYBRID_NORM in stored.index.tensors:
        # Megatron's HybridModel, alone or as the language model of another maker's.
        HYBRID.require_architecture(architecture)
        stored = PairedLayers(stored, dialect.language)
    return TranslatedCheckpoint(stack_layers(stored, dialect, architecture), dialect, architecture)


def require_own_keys(folder: Path, keys: Iterable[str]) -> None:
    """Raise BadInput if `keys` are another maker's: in a file of one layout these are not read."""
    dialect = dialect_of(folder, keys)
    if dialect is not None:
        title = format_of(identify(folder)).title
        raise BadInput(
            f"{folder} has the keys of {dialect.maker} and is of {title}, in "
            f"which they are not read. Save it there with --ckpt-format {DEFAULT_FORMAT}."
        )
