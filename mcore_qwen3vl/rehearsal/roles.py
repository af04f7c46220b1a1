"""The kinds of ranks of a run, by what they hold; one rank of each kind is rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.training.arguments.layout import OWN_SPLIT


@dataclass(frozen=True)
class Role:
    """One rank that stands for all that do the same.

    Attributes:
        rank: global rank: the first of its TP x CP group, with data-parallel rank 0.
        stage: pipeline stage, from 0.
        stages: number of pipeline stages like this one.
    """

    name: str
    rank: int
    stage: int
    stages: int = 1


def roles_of(command: Command, a: Architecture, chosen: Sequence[str] = ("all",)) -> list[Role]:
    """Return the distinct roles of a run, in the order of the pipeline.

    A role has all virtual stages of its rank. Middle stages are one role if their virtual stages
    have equally many layers; the first of them keeps the most micro-batches and stands for the
    others. Ranks of one TP, CP, DP or EP group are assumed to be alike.

    Args:
        chosen: ``all``, or some of ``first``, ``middle`` and ``last``.

    Raises:
        BadInput: a name in `chosen` is not known, or the run has no such role.
    """
    unknown = set(chosen) - {"all", "first", "middle", "last"}
    if unknown:
        raise BadInput(
            f"--roles: {', '.join(sorted(unknown))} is not one of all, first, middle, last."
        )
    every = _all(command, a)
    if "all" in chosen:
        return every
    kept = [role for role in every if _kind(role, command.layout.pp) & set(chosen)]
    if not kept:
        raise BadInput(f"--roles {','.join(chosen)}: PP {command.layout.pp} has no such stage.")
    return kept


def _kind(role: Role, stages: int) -> set[str]:
    ends = {"first"} if role.stage == 0 else set()
    ends |= {"last"} if role.stage == stages - 1 else set()
    return ends or {"middle"}


def _all(command: Command, a: Architecture) -> list[Role]:
    layout = command.layout
    if layout.pp == 1:
        return [Role("every rank", 0, 0)]
    every_one = any(getattr(command.args, name) for name in OWN_SPLIT)
    held = layout.virtual_stages(a.num_hidden_layers)
    middle: dict[object, list[int]] = {}
    for stage in range(1, layout.pp - 1):
        alike = tuple(len(layers) for layers in held[stage :: layout.pp])
        middle.setdefault(stage if every_one else alike, []).append(stage)
    virtual = f", {layout.vpp} virtual" if layout.vpp > 1 else ""
    roles = [Role(f"first stage{virtual}", _rank(command, 0), 0)]
    for stages in middle.values():
        name = f"stage {stages[0]}" if len(stages) == 1 else f"middle stages (as {stages[0]})"
        roles.append(Role(name + virtual, _rank(command, stages[0]), stages[0], len(stages)))
    last = layout.pp - 1
    return [*roles, Role(f"last stage{virtual}", _rank(command, last), last)]


def _rank(command: Command, stage: int) -> int:
    layout = command.layout
    if command.value("--use-tp-pp-dp-mapping") is not None:
        return stage * layout.tp * layout.cp
    return stage * layout.tp * layout.cp * layout.dp
