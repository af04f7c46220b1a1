"""The plan of a conversion as units of work, and the engine that runs them.

The engine runs units on a few threads, with a journal; the target appears when it is complete.
The units read, write and copy memory, during which Python's interpreter lock is free.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypedDict

from mcore_qwen3vl import __version__
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.part_staging import part_staging
from mcore_qwen3vl.converters.storage.staging import Meter, Progress, Staging, check_target, staging
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.machine import usable_cores
from mcore_qwen3vl.part import Part
from mcore_qwen3vl.unused.fields import Unused

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

    def run_unit(self, unit: Unit, tree: Path, advance: Callable[[int, str], None]) -> Any:
        """Do one unit durably, report with `advance(bytes, name)`, return JSON for the journal."""

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
        unused: what nothing uses of files other than those beside the config.
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
    unused: tuple[Unused, ...] = ()

    @property
    def tensors(self) -> int:
        """Number of tensors in the target; in mcore, stacked layers are one tensor."""
        return len({tensor.target.split("[")[0] for tensor in self.planned})

    @property
    def tensors_in_words(self) -> str:
        """The number of tensors in the target and their format: ``98 Megatron-Core tensors``."""
        return tensor_count_in_words(self.direction, self.tensors)

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


def tensor_count_in_words(direction: str, number: int) -> str:
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


MOST_WORKERS = 8


def default_workers() -> int:
    """Return two threads per core that this process may use, at most `MOST_WORKERS`.

    While one thread waits for the disk, another can use its core.
    """
    return min(2 * usable_cores(), MOST_WORKERS)


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion.

    Attributes:
        direction: "hf-to-mcore", "mcore-to-hf", "hf-to-hf" or "lora merge".
        tensors: number of tensors in the target; in mcore, stacked layers are one tensor.
        nbytes, files: bytes of tensor data, and number of files with such.
        companion_files: other files that were copied: config, tokenizer, processor.
        expert_layout: layout of the fused experts on the HF side; None for a dense model.
        resumed_units: number of units that an interrupted run had finished.
        seconds: wall time.
        notes: what the user should know, one sentence each.
    """

    direction: str
    source: str
    target: str
    tensors: int
    nbytes: int
    files: int
    companion_files: tuple[str, ...]
    dtypes: tuple[str, ...]
    expert_layout: str | None
    resumed_units: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def tensors_in_words(self) -> str:
        """The number of tensors in the target and their format: ``98 Megatron-Core tensors``."""
        return tensor_count_in_words(self.direction, self.tensors)


@dataclass(frozen=True)
class PartResult:
    """The result of one part of a conversion.

    Attributes:
        units, nbytes: the part's units of work, and the bytes of their tensors.
        resumed_units: number of units that were finished before.
        missing: the parts that are not done yet; none if the target was written.
        published: the result of the whole, if the target was written.
    """

    part: Part
    target: str
    units: int
    nbytes: int
    resumed_units: int
    seconds: float
    missing: tuple[Part, ...]
    notes: tuple[str, ...]
    published: ConversionResult | None


class Interrupted(BadInput):
    """A conversion that could not read or write a file; the same command continues it."""


class Writing(TypedDict, total=False):
    """The options of `write`, which every conversion takes."""

    force: bool
    workers: int | None
    progress: Progress | None
    strict: bool


def write(
    plan: Callable[[], ConversionPlan],
    dst: str | Path,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> ConversionResult:
    """Check that `dst` may be written, make the plan and carry it out.

    Args:
        plan: returns the plan; see the `plan_*` functions of `convert`.
        dst: directory to write; it appears by a rename once everything is durably written.
        force: replace `dst` if it is a checkpoint.
        workers: number of threads; default: two per core, at most `MOST_WORKERS`.
        progress: called with the bytes done, the bytes in all and the name of the current tensor.
        strict: write nothing if a value is NaN or infinite. Otherwise the result's notes say so.

    Raises:
        BadInput: `plan` raised it; `dst` exists; or reading or writing failed, in which case
            running again continues where this run stopped.
        CheckFailed: a value is NaN or infinite and `strict` is set; the message names the tensors.
    """
    dst = Path(dst)
    check_target(dst, force=force, replaceable=_is_checkpoint)
    planned = plan()
    started = time.monotonic()
    _require_apart(planned, dst)
    try:
        with staging(dst, planned.fingerprint, force=force, replaceable=_is_checkpoint) as stage:
            kept = _kept(planned, stage)
            planned.conversion.prepare(stage.tree)
            _run_units(planned, planned.units, kept, stage, workers, progress)
            results = {u.name: stage.done[u.name] for u in planned.units}
            nonfinite = nonfinite_notes(results.values())
            if strict and nonfinite:
                raise CheckFailed(f"{planned.source}: {' '.join(nonfinite)} Nothing was written.")
            planned.conversion.finish(stage.tree, results)
            stage.publish()
    except OSError as error:
        raise Interrupted(
            f"the conversion of {planned.source} stopped: {error}. {dst} is as it was; what is "
            "finished is kept beside it, and running the same command again continues from there."
        ) from error
    return _result(planned, dst, len(kept), started, nonfinite)


def write_part(
    plan: Callable[[], ConversionPlan],
    dst: str | Path,
    part: Part,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> PartResult:
    """Do one part of a conversion; the part that ends as the last one writes `dst` as `write` does.

    Parts run at once or one after another, in any order and on any machines that see `dst` under
    the same path. No two of them write to the same file. The arguments and errors are those of
    `write`. A killed or failed part goes on when it is started again; a finished part does nothing.

    Raises:
        BadInput: as for `write`; or parts of other work are there, or this part is being done.
    """
    dst = Path(dst)
    check_target(dst, force=force, replaceable=_is_checkpoint)
    planned = plan()
    started = time.monotonic()
    _require_apart(planned, dst)
    shares = _shares(planned, part.count)
    mine = shares[part.index]
    depends = _depends_on(planned, part, strict=strict)
    published = None
    try:
        with part_staging(
            dst, part, planned.fingerprint, depends, force=force, replaceable=_is_checkpoint
        ) as stage:
            kept = _kept(planned, stage)
            for unit in planned.units:
                if unit.name in stage.done and unit.name not in kept:
                    stage.strike(unit.name)
            planned.conversion.prepare(stage.tree)
            if any(unit.name not in kept for unit in mine):
                with stage.released():
                    _run_units(planned, mine, kept, stage, workers, progress)
            nonfinite = nonfinite_notes(stage.done[unit.name] for unit in mine)
            if strict and nonfinite:
                raise CheckFailed(
                    f"{planned.source}: {' '.join(nonfinite)} {dst} will not be written: delete "
                    f"{stage.folder}, with what the parts have done."
                )
            # A part may have no units: it counts as done once it has run.
            if f"part {part}" not in stage.done:
                stage.record_held(f"part {part}", {})
            parts = [Part(index, part.count) for index in range(part.count)]
            missing = [
                each
                for each, share in zip(parts, shares, strict=True)
                if not {f"part {each}", *(unit.name for unit in share)} <= stage.done.keys()
            ]
            if not missing:
                results = {u.name: stage.done[u.name] for u in planned.units}
                planned.conversion.finish(stage.tree, results)
                stage.publish()
                of_all = nonfinite_notes(results.values())
                published = _result(planned, dst, 0, started, of_all)
    except OSError as error:
        raise Interrupted(
            f"part {part} of the conversion of {planned.source} stopped: {error}. {dst} is as it "
            "was; what is finished is kept beside it, and running the same command again continues "
            "from there."
        ) from error
    return PartResult(
        part=part,
        target=str(dst),
        units=len(mine),
        nbytes=sum(unit.nbytes for unit in mine),
        resumed_units=sum(unit.name in kept for unit in mine),
        seconds=time.monotonic() - started,
        missing=tuple(missing),
        notes=(*planned.notes, *nonfinite),
        published=published,
    )


def _shares(plan: ConversionPlan, count: int) -> list[list[Unit]]:
    """Return the units of each of `count` parts, which take files in turn.

    One file belongs to one part, since two machines cannot safely write to one file on some network
    file systems.
    """
    files: dict[Path | str, list[Unit]] = {}
    for unit in plan.units:
        files.setdefault(plan.conversion.file(unit, Path()) or unit.name, []).append(unit)
    groups = list(files.values())
    parts = (Part(index, count) for index in range(count))
    return [[unit for group in part.in_turn(groups) for unit in group] for part in parts]


_WORDS = {
    "source": "the source",
    "dtype": "--dtype",
    "vocabulary": "the rows of the padded vocabulary",
    "dialect": "--dialect",
    "spec": "--spec",
    "layout": "the layout",
    "shard": "--max-shard-size, in bytes",
    "vocab_size": "--resize-vocab",
    "card": "--model-card, with its --certificate",
}
"""The words of messages for what a plan's identity has, where its own name is not enough."""


def _depends_on(plan: ConversionPlan, part: Part, *, strict: bool) -> dict[str, Any]:
    """Return what all parts must have in common, by its name in messages."""
    depends: dict[str, Any] = {
        "the number of parts": part.count,
        "the direction": plan.direction,
        "the version of mcore-qwen3vl": __version__,
        "--strict": strict,
    }
    for name, value in plan.identity.items():
        if name != "files":
            depends[_WORDS.get(name, name)] = value
    for name, *state in plan.identity.get("files", ()):
        depends[f"size and time of the source's {name}"] = state
    return {**depends, "the plan": plan.fingerprint}


def _result(
    planned: ConversionPlan,
    dst: Path,
    resumed: int,
    started: float,
    nonfinite: tuple[str, ...],
) -> ConversionResult:
    return ConversionResult(
        direction=planned.direction,
        source=planned.source,
        target=str(dst),
        tensors=planned.tensors,
        nbytes=planned.nbytes,
        files=planned.files,
        companion_files=tuple(planned.companion_files),
        dtypes=planned.dtypes,
        expert_layout=planned.expert_layout,
        resumed_units=resumed,
        seconds=time.monotonic() - started,
        notes=(*planned.notes, *nonfinite),
    )


def _is_checkpoint(path: Path) -> bool:
    return identify(path).is_checkpoint


def plan_and_write(
    plan: Callable[..., ConversionPlan], src: str | Path, dst: str | Path, options: dict[str, Any]
) -> ConversionResult:
    """Plan and write a conversion; `options` are those of `plan` and of `write`."""
    writing = {name: options.pop(name) for name in Writing.__annotations__ if name in options}
    return write(partial(plan, src, **options), dst, **writing)


def _kept(plan: ConversionPlan, stage: Staging) -> set[str]:
    """Return the finished units whose files are still there."""
    kept = set()
    for unit in plan.units:
        file = plan.conversion.file(unit, stage.tree)
        if (done := stage.done.get(unit.name)) is not None and (
            file is None or (file.is_file() and file.stat().st_size == done["size"])
        ):
            kept.add(unit.name)
    return kept


def _run_units(
    plan: ConversionPlan,
    units: Sequence[Unit],
    kept: set[str],
    stage: Staging,
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Run those of `units` that are not in `kept`."""
    meter = Meter(sum(unit.nbytes for unit in units), progress)
    meter.add(sum(unit.nbytes for unit in units if unit.name in kept), "resumed")
    stop = threading.Event()

    def advance(nbytes: int, name: str) -> None:
        meter.add(nbytes, name)
        if stop.is_set():
            raise _Stopped

    def work(unit: Unit) -> None:
        if not stop.is_set():
            stage.record_finished(unit.name, plan.conversion.run_unit(unit, stage.tree, advance))

    with ThreadPoolExecutor(workers or default_workers()) as pool:
        futures = [pool.submit(work, unit) for unit in units if unit.name not in kept]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # after an error or an interrupt, the other workers stop at the next tensor
    errors = [error for future in done if (error := future.exception()) is not None]
    # The cause is raised; that the other workers were stopped by it comes last.
    for error in sorted(errors, key=lambda e: isinstance(e, _Stopped)):
        raise error


class _Stopped(Exception):
    """Another worker failed."""


def _require_apart(plan: ConversionPlan, dst: Path) -> None:
    """Raise BadInput if source and target overlap, since --force would then delete the source."""
    source, target = Path(plan.source).resolve(), dst.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise BadInput(
            f"{dst} and the source {plan.source} overlap: they are the same directory, or one "
            "contains the other. Write to a directory apart from the source."
        )
