"""Two runs of training, compared step by step: ``verify resume A B``.

One may be the other stopped and resumed, or have another layout. What a step begins with is
compared before what it computes, so the first difference is where to look.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.identify import folder_name, numbered_iterations
from mcore_qwen3vl.converters.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.storage.archive import PickledObject
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.data.loader_state import position_in
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.settings.run import ParallelSettings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.verification.measurement import Finding, Measurement
from mcore_qwen3vl.verification.report import Report

_PARAMETER, _MOMENTS = "optimizer.state.param.", ("exp_avg", "exp_avg_sq")
_NO_GRADIENT = 1e-4
"""Of the largest gradient of a tensor: a smaller one may be rounding alone. Adam steps an element
by its rate, however small its gradient is, so weights are compared where gradients are larger."""


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences between two runs of the same numbers.

    Attributes:
        logged: of the numbers of a log, by :func:`kind_of`.
        moments: the norm of the difference of a tensor's moments, over the norm of the moments.
        weights: the root mean square of the difference of a tensor's weights, over the sum of the
            learning rates so far, which is how far Adam may have moved them.
    """

    logged: Mapping[str, float]
    moments: float
    weights: float

    def times(self, factor: float) -> Tolerances:
        """Return the tolerances for runs driven apart by rounding; the rate's stays as it is."""
        logged = {kind: factor * limit for kind, limit in self.logged.items()}
        logged["rate"] = self.logged["rate"]
        return Tolerances(logged, factor * self.moments, factor * self.weights)

    def of(self, key: str) -> float | None:
        """Return that of a logged number; None for one that two runs need not share."""
        kind = kind_of(key)
        return None if kind is None else self.logged[kind]


def kind_of(key: str) -> str | None:
    """Return which limit is a logged number's; None for one of speed or of the layout."""
    if key == "learning rate":
        return "rate"
    if "grad norm" in key:
        return "grad norm"
    return "loss" if key.endswith("loss") else None


LOGGED = {"loss": 2e-5, "grad norm": 3e-4, "rate": 1e-9}
"""Largest relative differences in float32 between two layouts, or to a plain loop, in few steps;
the norm of a step carries what rounding did to the weights of the steps before."""
LOGGED_IN_HALF = {"loss": 2e-2, "grad norm": 2e-1, "rate": 1e-9}
"""The same in bf16 and fp16, whose rounding differs with the order of sums."""
FLOAT32 = Tolerances(LOGGED, moments=1e-3, weights=1e-2)
HALF = Tolerances(LOGGED_IN_HALF, moments=3e-1, weights=5e-1)


@dataclass
class RunComparison(Report):
    """The report on two runs; its findings are in the order of the steps."""

    not_compared: list[str] = field(default_factory=list)

    @property
    def notes(self) -> dict[str, str]:
        paragraphs = {}
        if wrong := next((one for one in self.findings if not one.ok), None):
            paragraphs["The first difference"] = str(wrong)
        if self.not_compared:
            paragraphs["Not compared"] = "\n".join(self.not_compared)
        return paragraphs


class SavedRun:
    """What a run left: the folder of its checkpoints, its log and the names of its records."""

    def __init__(self, folder: Path, log: Path | None, records: Path | None) -> None:
        """
        Raises:
            BadInput: the folder has no checkpoint, or a file cannot be read.
        """
        self.folder = folder
        self.iterations = sorted(numbered_iterations(folder))
        if not self.iterations:
            raise BadInput(
                f"{folder} has no checkpoints iter_*: give the folder that the run had as --save."
            )
        self.log = {} if log is None else _read_log(log)
        self.records = {} if records is None else _read_records(records)

    def checkpoint(self, iteration: int) -> SavedStep:
        return SavedStep(self.folder, iteration)


class SavedStep:
    """A checkpoint of a run."""

    def __init__(self, folder: Path, iteration: int) -> None:
        self._run, self.iteration = folder, iteration

    @cached_property
    def tensors(self) -> TorchDistCheckpoint:
        return TorchDistCheckpoint(self._run / folder_name(self.iteration))

    @cached_property
    def _common(self) -> Mapping[str, Any]:
        return self.tensors.common_state()

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        return self.tensors.arguments()

    @property
    def is_half(self) -> bool:
        return bool(self.arguments.get("bf16") or self.arguments.get("fp16"))

    @property
    def layout(self) -> Layout:
        flags = Namespace(**{**vars(ParallelSettings()), **self.arguments})
        moe = bool(self.arguments.get("num_experts"))
        found = Layout.from_flags(flags, flags.world_size, moe=moe)
        return found if moe else replace(found, ep=1, etp=1)  # Megatron sets ETP without experts

    @property
    def rate(self) -> float:
        """The largest learning rate of the schedule."""
        return float(self.schedule.get("max_lr") or self.arguments.get("lr") or 0.0)

    @property
    def schedule(self) -> Mapping[str, Any]:
        found = self._common.get("opt_param_scheduler")
        return found if isinstance(found, Mapping) else {}

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        record = RunRecord.of_checkpoint(self._run, self.iteration)
        return {} if record is None else record.rows

    @property
    def samples(self) -> Any:
        return self.arguments.get("consumed_train_samples")

    @property
    def position(self) -> int | None:
        """The position in the one order of all records; None where there is no such order."""
        state = data_state.first_state_of(self._run, self.iteration)
        return None if state is None else position_in(state)

    @property
    def random_states(self) -> list[Any]:
        return list(self.tensors.objects("rng_state"))


def compare_runs(
    a: Path,
    b: Path,
    *,
    logs: tuple[Path, Path] | None = None,
    records: tuple[Path, Path] | None = None,
    loosen: float = 1.0,
) -> RunComparison:
    """Compare two runs in every step that both have logged or saved.

    Args:
        a, b: folders of checkpoints, ``--save`` of the runs.
        logs: their files of ``--log-json``.
        records: their folders of ``--log-records``.
        loosen: what all limits are multiplied by; over many steps, rounding drives runs apart.

    Raises:
        BadInput: a folder holds no run, or the two have no step in common.
    """
    one, other = (
        SavedRun(folder, *(None if pair is None else pair[side] for pair in (logs, records)))
        for side, folder in enumerate((a, b))
    )
    saved = sorted({*one.iterations} & {*other.iterations})
    logged = one.log.keys() & other.log.keys()
    noted = one.records.keys() & other.records.keys()
    if not (saved or logged or noted):
        raise BadInput(f"{a} and {b} have no step in common: {one.iterations}, {other.iterations}.")
    # A checkpoint's settings are of the steps since the checkpoint before.
    in_effect = {before + 1: step for before, step in pairwise((0, *saved))}
    steps = sorted({*saved, *logged, *noted, *in_effect})
    report = RunComparison(f"{a.name} and {b.name}, step by step")
    last = one.checkpoint(one.iterations[-1]), other.checkpoint(other.iterations[-1])
    tolerances = (HALF if any(step.is_half for step in last) else FLOAT32).times(loosen)
    report.environment = {"layouts": " and ".join(str(step.layout) for step in last)}
    report.not_compared = _not_compared(one, other, logs, records, saved, last[0])
    for step in steps:
        found: list[Finding] = []
        if step in in_effect:
            found += _settings(*(run.checkpoint(in_effect[step]) for run in (one, other)))
        if step in noted:
            found.append(_names_of_records(one.records[step], other.records[step]))
        if step in logged:
            found += _logged(one.log[step], other.log[step], tolerances)
        if step in saved:
            mine, theirs = one.checkpoint(step), other.checkpoint(step)
            found += _states(mine, theirs)
            found += _moments(mine.tensors, theirs.tensors, tolerances)
            moved = sum(_rates(one, step)) or mine.rate * step
            found += _weights(mine.tensors, theirs.tensors, moved, tolerances)
        report.findings += [replace(finding, context=f"step {step}") for finding in found]
    return report


def _not_compared(
    one: SavedRun,
    other: SavedRun,
    logs: tuple[Path, Path] | None,
    records: tuple[Path, Path] | None,
    saved: Sequence[int],
    last: SavedStep,
) -> list[str]:
    """Return sentences on what there is nothing of."""
    sentences = []
    if logs is None:
        sentences.append("losses, norms and rates: give the files of --log-json with --logs A B.")
    if records is None:
        sentences.append(
            "the records of each step: give the folders of --log-records with --records A B."
        )
    if not saved:
        sentences.append(
            f"states: there are checkpoints of {one.iterations} and {other.iterations}."
        )
    elif not any(_moment_keys(last.tensors)):
        sentences.append(
            "moments: A has none by the names of parameters (--no-save-optim, or another form)."
        )
    return sentences


def _rates(run: SavedRun, step: int) -> Iterator[float]:
    """Yield the learning rates of the steps to this one, if all of them were logged."""
    if all(number in run.log for number in range(1, step + 1)):
        for number in range(1, step + 1):
            yield float(run.log[number].get("learning rate") or 0.0)


def _names_of_records(mine: Counter[str], other: Counter[str]) -> Finding:
    flaw = ""
    if mine != other:
        sides = (("A", mine - other), ("B", other - mine))
        parts = (f"only {side} has {_some(names)}" for side, names in sides if names)
        flaw = "; ".join(parts)
    count = sum(mine.values())
    return Finding("records", "names", Measurement(count=count), flaw=flaw)


def _some(names: Counter[str]) -> str:
    listed = sorted(names.elements())
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _logged(
    mine: Mapping[str, Any], other: Mapping[str, Any], tolerances: Tolerances
) -> Iterator[Finding]:
    """Compare the numbers of a step, those that a step begins with before those it computes."""
    keys = [key for key in mine if key in other and tolerances.of(key) is not None]
    for key in sorted(keys, key=lambda key: (key != "learning rate", "grad norm" in key)):
        a, b, tolerance = mine[key], other[key], tolerances.of(key)
        assert tolerance is not None
        if a is None or b is None:
            flaw = "" if a is b else f"{a} in A, {b} in B"
            yield Finding("log", key, flaw=flaw)
        else:
            measured = Measurement(abs(a - b), max(abs(a), abs(b)), 1)
            flaw = "" if measured.relative <= tolerance else f"{a:.7g} in A, {b:.7g} in B"
            yield Finding("log", key, measured, tolerance, flaw=flaw)


def _settings(a: SavedStep, b: SavedStep) -> Iterator[Finding]:
    """Compare what decides a run's result, but for the layout."""
    rows, others = a.settings, b.settings
    for row in sorted((rows.keys() & others.keys()) - {"layout"}):
        wrong = [n for n in rows[row].keys() & others[row] if rows[row][n] != others[row][n]]
        texts = (f"{n}: {rows[row][n]} in A, {others[row][n]} in B" for n in sorted(wrong))
        yield Finding("settings", row, flaw="; ".join(texts)[:300])


def _states(a: SavedStep, b: SavedStep) -> Iterator[Finding]:
    """Compare what the next step begins with, besides tensors."""
    yield _same("data", "samples taken", a.samples, b.samples)
    if a.position is not None and b.position is not None:
        yield _same("data", "position", a.position, b.position)
    schedule, other = a.schedule, b.schedule
    for name in sorted(schedule.keys() & other.keys()):
        yield _same("schedule", name, schedule[name], other[name])
    if a.layout == b.layout:
        yield Finding(
            "random states", "all ranks", flaw=_first_unequal(a.random_states, b.random_states)
        )


def _same(part: str, name: str, a: Any, b: Any) -> Finding:
    return Finding(part, name, flaw="" if a == b else f"{a} in A, {b} in B")


def _first_unequal(a: Any, b: Any, path: str = "") -> str:
    """Return where two nested values differ; an empty text if nowhere."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return f"{path or 'they'} have other keys"
        return next(filter(None, (_first_unequal(a[k], b[k], f"{path}{k} ") for k in a)), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{path}has {len(a)} in A, {len(b)} in B"
        parts = zip(a, b, strict=True)
        return next(filter(None, (_first_unequal(*two, path) for two in parts)), "")
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return "" if torch.equal(a, b) else f"{path}differs"
    if isinstance(a, PickledObject) and type(a) is type(b):  # such as numpy's state
        return _first_unequal((a.args, a.state), (b.args, b.state), path)
    if not isinstance(a, int | float | str | bytes | bool | type | None):
        return f"{path}is of type {type(a).__name__}, which this cannot compare"
    return "" if a == b else f"{path}differs"


def _moment_keys(checkpoint: MegatronCheckpoint) -> Iterator[tuple[str, str, str]]:
    """Yield (moment, parameter, key) of all moments by the names of parameters."""
    for key in checkpoint.index.tensors:
        for moment in _MOMENTS:
            prefix = f"optimizer.state.{moment}."
            if key.startswith(prefix):
                yield moment, key.removeprefix(prefix), key


def _moments(
    a: MegatronCheckpoint, b: MegatronCheckpoint, tolerances: Tolerances
) -> Iterator[Finding]:
    for moment, parameter, key in _moment_keys(a):
        if flaw := _unlike(a, b, key):
            yield Finding(moment, parameter, flaw=flaw)
            continue
        difference = scale = 0.0
        count = 0
        for mine, other in _boxes(a, b, key):
            difference += float((mine - other).square().sum())
            scale += float(other.square().sum())
            count += mine.numel()
        measured = Measurement(math.sqrt(difference), math.sqrt(scale), count)
        yield Finding(moment, parameter, measured, tolerances.moments)


def _weights(
    a: MegatronCheckpoint, b: MegatronCheckpoint, moved: float, tolerances: Tolerances
) -> Iterator[Finding]:
    for key in sorted(a.model_keys()):
        main = f"{_PARAMETER}{key}"
        stored = main if main in a.index.tensors and main in b.index.tensors else key
        if flaw := _unlike(a, b, stored):
            yield Finding("weights", key, flaw=flaw)
            continue
        squares = f"optimizer.state.exp_avg_sq.{key}"
        largest = _largest(a, squares)
        difference, count = 0.0, 0
        for start, size in _places(a, stored):
            gap = a.read(stored, start, size).double() - b.read(stored, start, size).double()
            if largest:
                steady = a.read(squares, start, size).sqrt() >= _NO_GRADIENT * largest
                gap = gap[steady]
            difference += float(gap.square().sum())
            count += gap.numel()
        error = math.sqrt(difference / max(count, 1))
        yield Finding("weights", key, Measurement(error, moved, count), tolerances.weights)


def _largest(checkpoint: MegatronCheckpoint, key: str) -> float:
    """Return the largest root of a tensor's values; 0 if there is no such tensor."""
    if key not in checkpoint.index.tensors:
        return 0.0
    places = _places(checkpoint, key)
    return math.sqrt(max(float(checkpoint.read(key, *place).max()) for place in places))


def _unlike(a: MegatronCheckpoint, b: MegatronCheckpoint, key: str) -> str:
    if key not in b.index.tensors:
        return "only in A"
    mine, other = a.index.tensors[key].shape, b.index.tensors[key].shape
    return "" if mine == other else f"{list(mine)} in A, {list(other)} in B"


def _places(
    checkpoint: MegatronCheckpoint, key: str
) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return start and size of a tensor's chunks: what is read at a time."""
    return [(chunk.offsets, chunk.sizes) for chunk in checkpoint.index.tensors[key].chunks]


def _boxes(
    a: MegatronCheckpoint, b: MegatronCheckpoint, key: str
) -> Iterator[tuple[Tensor, Tensor]]:
    for place in _places(a, key):
        yield a.read(key, *place).double(), b.read(key, *place).double()


def _read_log(file: Path) -> dict[int, dict[str, Any]]:
    """Return the numbers of each step; of a repeated step, the last time's numbers."""
    return {
        entry["iteration"]: entry for entry in _lines(file) if "learning rate" in entry
    }  # the others are of validations


def _read_records(folder: Path) -> dict[int, Counter[str]]:
    """Return how often each record is in each step, over all ranks."""
    files = sorted(folder.glob("rank_*.jsonl"))
    if not files:
        raise BadInput(f"{folder} has no rank_*.jsonl: give the folder of --log-records.")
    found: dict[int, Counter[str]] = {}
    for file in files:
        last = {entry["iteration"]: entry["records"] for entry in _lines(file)}
        for step, names in last.items():
            # Folders differ between machines, and a record's file and number do not.
            short = (name.rsplit("/", 1)[-1] for name in names)
            found.setdefault(step, Counter()).update(short)
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("iteration"), int):
                raise BadInput(f"{file}, line {number}: it is no line of a run's log.")
            yield entry
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read as lines of JSON ({error}).") from None
