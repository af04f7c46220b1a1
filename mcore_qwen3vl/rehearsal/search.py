"""The search for runs that fit: other layouts in the order of a roofline, or single changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.material import sample_of
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, Remedy
from mcore_qwen3vl.rehearsal.rehearse import Rehearser, checked
from mcore_qwen3vl.rehearsal.roofline import NODE, Step, step_seconds
from mcore_qwen3vl.runtime.gpus import Gpu, allowance_gib
from mcore_qwen3vl.training import memory
from mcore_qwen3vl.training.arguments.command_line import NONE, RESETTABLE, SIZES

WANTED = 3
TRIED = 9
"""The most candidates to rehearse; the run's own layout may be one more."""
ESTIMATE_OFF = 1.15
"""The estimate of memory may be too high by this factor."""
_RECOMPUTE = "--recompute-granularity"
_REPLACED = (*SIZES, "--expert-tensor-parallel-size", *RESETTABLE)


@dataclass(frozen=True)
class Candidate:
    """A layout of the same run.

    Attributes:
        flags: flags to append to the run's own, to override them; empty for the run's own layout.
        seconds: seconds of a step, by the roofline.
        estimate: modelled bytes of the fullest rank.
    """

    command: Command
    flags: tuple[str, ...]
    seconds: float
    estimate: float

    @property
    def own(self) -> bool:
        """Whether it is the run's own layout."""
        return not self.flags


@dataclass(frozen=True)
class Fit:
    """A candidate and its rehearsal."""

    candidate: Candidate
    rehearsal: Rehearsal

    @property
    def good(self) -> bool:
        """Whether it fits, with memory to spare on every role."""
        return self.rehearsal.fits and not any(outcome.tight for outcome in self.rehearsal.outcomes)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, modelled from the rehearsal; None if the layout does not run."""
        return self.rehearsal.step.seconds if self.rehearsal.step else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row for ``--json``; sizes in bytes."""
        return {
            "layout": str(self.candidate.command.layout),
            "own": self.candidate.own,
            "flags": list(self.candidate.flags),
            "fits": self.good,
            "verdict": self.rehearsal.verdict,
            "peak (measured)": self.rehearsal.fullest.peak,
            "reserved (measured)": self.rehearsal.fullest.reserved,
            "usable": self.rehearsal.fullest.usable,
            "seconds a step (modelled)": self.seconds,
        }


def search(rehearser: Rehearser, command: Command, a: Architecture) -> list[Fit]:
    """Rehearse candidates, the fastest first, until three fit with memory to spare.

    The run's own layout is rehearsed in any case, if it is valid on these GPUs.

    Returns:
        All rehearsed candidates: those that fit first, then the others, each by the modelled step.

    Raises:
        BadInput: no layout divides this model over these GPUs, or none is estimated to fit.
    """
    usable = rehearser.options.device(command).usable
    ranked = sorted(candidates(command, a, rehearser.options.gpu), key=lambda c: c.seconds)
    if all(c.estimate > ESTIMATE_OFF * usable for c in ranked):
        raise BadInput(
            f"No layout of this model fits on {command.gpus} GPUs; {len(ranked)} were "
            "estimated. Use more or larger GPUs, or a shorter --seq-length."
        )
    possible = [c for c in ranked if c.own or c.estimate <= ESTIMATE_OFF * usable]
    tried: list[Fit] = []
    for number, candidate in enumerate(possible):
        done = number >= TRIED or sum(fit.good for fit in tried) >= WANTED
        if done and not candidate.own:
            continue
        rehearsal = rehearser.rehearse(
            candidate.command, stop_at_failure=True, what=f"{candidate.command.layout}, "
        )
        tried.append(Fit(candidate, rehearsal))
    return sorted(tried, key=lambda fit: (not fit.good, fit.seconds or inf))


def candidates(command: Command, a: Architecture, gpu: Gpu) -> Iterator[Candidate]:
    """Yield layouts of powers of two, TP and EP up to a node, with and without full recompute.

    The run's own layout is among them, with its virtual stages and its own pipeline split.
    """
    trained = trained_of(command, a)
    try:
        checked(command)
    except BadInput:
        pass
    else:
        yield _candidate(command, (), a, gpu, trained)
    sizes = [2**n for n in range(12) if 2**n <= command.gpus]
    experts = [n for n in sizes if n <= NODE] if a.is_moe else [1]
    bare = command.without(*_REPLACED)
    for tp, pp, cp, ep, recompute in product(sizes, sizes, sizes, experts, (False, True)):
        if tp > NODE or command.gpus % (tp * pp * cp):
            continue
        flags = _flags(tp, pp, cp, ep, recompute, a.is_moe)
        made = bare.plus(*flags)
        if made.layout == command.layout and made.value(_RECOMPUTE) == command.value(_RECOMPUTE):
            continue
        try:
            checked(made)
        except BadInput:
            continue
        yield _candidate(made, (*flags, *_resets(command, flags)), a, gpu, trained)


def _flags(tp: int, pp: int, cp: int, ep: int, recompute: bool, moe: bool) -> tuple[str, ...]:
    named = (("tensor", tp), ("pipeline", pp), ("context", cp), ("expert", ep))
    flags: list[object] = []
    for name, size in named:
        if size > 1:
            model = "" if name == "context" else "model-"
            flags += [f"--{name}-{model}parallel-size", size]
    if tp > 1:
        flags.append("--sequence-parallel")
    if moe:
        flags += ["--expert-tensor-parallel-size", 1]
    if recompute:
        flags += FULL_RECOMPUTE
    return tuple(map(str, flags))


def _resets(command: Command, flags: Sequence[str]) -> Iterator[str]:
    """Yield the words that take back layout flags of `command` that are not in `flags`."""
    for name in _REPLACED:
        if name not in flags and command.value(name) is not None:
            yield from (name, "1" if name.endswith("-parallel-size") else NONE)


def trained_of(command: Command, a: Architecture) -> memory.TrainedCounts | None:
    """Count the parameters that a LoRA run trains; None for a run without LoRA."""
    return memory.trained_of(command.args, a, command.line.model)


def estimate_stages(
    command: Command, a: Architecture, trained: memory.TrainedCounts | None
) -> list[memory.Memory]:
    """Return the modelled memory of a rank of each pipeline stage, in order."""
    layout = Layout.from_flags(command.args, command.gpus, moe=a.is_moe)
    return memory.of_flags(command.args, a, layout, trained)


def _candidate(
    command: Command,
    flags: tuple[str, ...],
    a: Architecture,
    gpu: Gpu,
    trained: memory.TrainedCounts | None,
) -> Candidate:
    layout, (sample, side) = command.layout, sample_of(command)
    args = command.args
    step = Step(args.seq_length, args.micro_batch_size, command.micro_batches, sample, side**2)
    peak = max(stage.total for stage in estimate_stages(command, a, trained))
    extra = (allowance_gib(layout) - allowance_gib(command.without(*_REPLACED).layout)) * 2**30
    seconds = step_seconds(a, layout, gpu, step, args.recompute_granularity == "full")
    return Candidate(command, flags, seconds, peak + extra)


GPUS_OF_A_NODE = 8
"""The largest TP, because its exchange needs NVLink."""
FULL_RECOMPUTE = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", 1),
)

Change = tuple[str, tuple[object, ...], int]
"""A change in words, the flags to append for it, and the number of GPUs."""


def suggest_remedies(rehearser: Rehearser, command: Command, rehearsal: Rehearsal) -> list[Remedy]:
    """Rehearse the neighbours of a run that is out of memory; for any other run, return none.

    Each neighbour has one change. If none of them fits, full recompute is tried together with each
    of the others. A neighbour fits if all of its roles do; else its first role that fails is
    reported.
    """
    if not any(outcome.out_of_memory for outcome in rehearsal.outcomes):
        return []
    single = list(neighbours(command))
    tried = _try(rehearser, command, single)
    if any(remedy.fits for remedy in tried) or _recomputes(command):
        return tried
    pairs = [
        (f"full recompute and {change}", (*FULL_RECOMPUTE, *flags), gpus)
        for change, flags, gpus in single
        if flags != FULL_RECOMPUTE
    ]
    return tried + _try(rehearser, command, pairs)


def _recomputes(command: Command) -> bool:
    return command.value("--recompute-granularity") == "full"


def neighbours(command: Command) -> Iterator[Change]:
    """Yield one change in each direction; the model or the GPUs may still not allow it."""
    layout, gpus = command.layout, command.gpus
    if not _recomputes(command):
        yield "recompute of the vision tower", ("--recompute-vision",), gpus
        yield "full recompute", FULL_RECOMPUTE, gpus
    if command.value("--use-distributed-optimizer") is None and layout.dp > 1:
        yield "the distributed optimizer", ("--use-distributed-optimizer",), gpus
    if 2 * layout.tp <= GPUS_OF_A_NODE:
        flags = ("--tensor-model-parallel-size", 2 * layout.tp, "--sequence-parallel")
        yield f"TP {2 * layout.tp}", flags, gpus
    yield f"CP {2 * layout.cp}", ("--context-parallel-size", 2 * layout.cp), gpus
    yield f"PP {2 * layout.pp}", ("--pipeline-model-parallel-size", 2 * layout.pp), gpus
    if command.value("--use-distributed-optimizer") is not None:
        yield f"{2 * gpus} GPUs (DP {2 * layout.dp})", (), 2 * gpus


def _try(rehearser: Rehearser, command: Command, changes: Sequence[Change]) -> list[Remedy]:
    remedies = []
    for change, flags, gpus in changes:
        neighbour = replace(command.plus(*flags), gpus=gpus)
        try:
            checked(neighbour)
            tried = rehearser.rehearse(neighbour, stop_at_failure=True, what=f"with {change}, ")
        except BadInput:  # the model or the ranks do not divide that way
            continue
        worst, words = tried.fullest, list(map(str, flags))
        why = "" if tried.fits else tried.verdict
        remedies.append(Remedy(change, words, gpus, tried.fits, worst.peak, worst.reserved, why))
    return remedies
