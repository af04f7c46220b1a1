"""The plan of a conversion: its units of work, its bytes, and the sources of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mcore_qwen3vl import __version__
from mcore_qwen3vl.converters.storage.boxes import Shape

NONFINITE_SHOWN = 5
"""The most tensors that a note on NaN or infinite values names."""


@dataclass(frozen=True)
class PlannedTensor:
    """One line of a dry run: a tensor of the result, and the tensors it is made of.

    The experts of one layer share one line.
    """

    sources: tuple[str, ...]
    target: str
    shape: Shape
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """The work that one worker does in one go; the journal records each finished unit."""

    name: str
    nbytes: int
    work: tuple[Any, ...]


class Conversion(Protocol):
    """One direction of conversion: how its units are run. All directions use the same engine."""

    def prepare(self, tree: Path) -> None:
        """Create whatever must exist before units run and does not exist yet."""

    def file(self, unit: Unit, tree: Path) -> Path | None:
        """Return the file whose size a finished unit's result gives; None if it writes none."""

    def run(self, unit: Unit, tree: Path, moved: Callable[[int, str], None]) -> Any:
        """Do one unit durably, report with `moved(bytes, name)`, return JSON for the journal."""

    def finish(self, tree: Path, results: dict[str, Any]) -> None:
        """Write what depends on all units; `results` is by unit name, in the plan's order."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that is ready to run; its inputs have been checked.

    Attributes:
        planned: the lines that a dry run prints.
        units: the work, in order.
        identity: JSON that distinguishes this plan from another; a resumed run must have the same.
        notes: what the user should know, one sentence each.
    """

    direction: str
    source: str
    planned: tuple[PlannedTensor, ...]
    units: tuple[Unit, ...]
    companion_files: dict[str, Path]
    expert_layout: str | None
    identity: dict[str, Any]
    conversion: Conversion = field(repr=False)
    files: int = 1
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """Number of tensors in the target; in mcore, stacked layers are one tensor."""
        return len({tensor.target.split("[")[0] for tensor in self.planned})

    @property
    def counted(self) -> str:
        """The number of tensors in the target and their format: ``98 Megatron-Core tensors``."""
        return tensors_in(self.direction, self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.dtype for tensor in self.planned}))

    @property
    def fingerprint(self) -> str:
        units = [(unit.name, unit.nbytes) for unit in self.units]
        content = json.dumps([__version__, self.direction, self.identity, units], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def tensors_in(direction: str, number: int) -> str:
    """Return a number of tensors in the target of a conversion, with their format."""
    form = "Megatron-Core" if direction == "hf-to-mcore" else "Hugging Face"
    return f"{number:,} {form} tensor{'' if number == 1 else 's'}"


def file_identity(files: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and time of files, to tell whether a source has changed since a run."""
    stats = ((file, file.stat()) for file in sorted(files))
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def group_units(
    work: Iterable[tuple[Any, int]], unit_bytes: int, name: Callable[[int], str]
) -> Iterator[Unit]:
    """Group consecutive work into units of about `unit_bytes`."""
    group: list[Any] = []
    size = number = 0
    for item, nbytes in work:
        if group and size + nbytes > unit_bytes:
            yield Unit(name(number), size, tuple(group))
            group, size, number = [], 0, number + 1
        group.append(item)
        size += nbytes
    if group:
        yield Unit(name(number), size, tuple(group))


def unit_bytes(total: int) -> int:
    """Return the unit size for `total` bytes: enough units for all workers, but not many files."""
    return min(max(total // 64, 256 * 2**20), 2 * 2**30)


def nonfinite_notes(results: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return one sentence that names the tensors with NaN or infinite values, or an empty tuple.

    The results of units of work list the names of such tensors under ``nonfinite``.
    """
    names = sorted({name for result in results for name in result.get("nonfinite", ())})
    if not names:
        return ()
    shown = ", ".join(names[:NONFINITE_SHOWN]) + (", ..." if len(names) > NONFINITE_SHOWN else "")
    count = "1 tensor has" if len(names) == 1 else f"{len(names)} tensors have"
    return (f"{count} NaN or infinite values: {shown}.",)
