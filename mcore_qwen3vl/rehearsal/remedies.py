"""Changes that may make a run fit: its neighbours, each of which is rehearsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, Remedy
from mcore_qwen3vl.rehearsal.rehearse import Rehearser, checked

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
        worst = max(tried.outcomes, key=lambda outcome: (not outcome.ok, outcome.reserved))
        why, words = "" if tried.fits else tried.verdict, list(map(str, flags))
        found = Remedy(change, words, gpus, tried.fits, worst.peak, worst.reserved, why)
        remedies.append(found)
    return remedies
