"""Which losses there are.

The command line, the data, the logs, rehearsals and checkpoints ask here. To delete a loss, delete
its file and its line in :data:`LOSSES`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby
from typing import Any

from mcore_qwen3vl.flags import add_flags, make_from_flags, stands_last
from mcore_qwen3vl.losses.classify import Classify
from mcore_qwen3vl.losses.embedding import Embedding
from mcore_qwen3vl.losses.loss import Loss, refuse_without
from mcore_qwen3vl.losses.reranker import Reranker
from mcore_qwen3vl.losses.reward import Reward

LOSSES: tuple[type[Loss], ...] = (
    Embedding,
    Reranker,
    Reward,
    Classify,
)
"""In the order of ``--help``."""


def kind_of(flags: Mapping[str, Any]) -> type[Loss] | None:
    """Return the loss that parsed `flags` name, by their ``dest`` names."""
    name = flags.get("task")
    return next((loss for loss in LOSSES if name in loss.names), None)


def loss_of(flags: argparse.Namespace) -> Loss | None:
    """Make the loss that parsed flags describe."""
    kind = kind_of(vars(flags))
    return make_from_flags(kind, flags, name=flags.task) if kind else None


def add_loss_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all losses, each once, and ``--task``."""
    seen = {"name"}
    for title, group in groupby(LOSSES, key=lambda loss: loss.group):
        losses, arguments = list(group), parser.add_argument_group(title)
        tasks = [loss for loss in losses if loss.flag == "--task"]
        if tasks:
            names = [name for loss in tasks for name in loss.names]
            text = ". ".join(loss.help for loss in tasks)
            arguments.add_argument("--task", choices=names, help=text)
        for last in (False, True):
            for loss in losses:
                others = {name for name, is_last in stands_last(loss).items() if is_last != last}
                add_flags(arguments, loss, leave_out=seen | others)
                seen |= stands_last(loss).keys() - others


def refuse_other_losses_flags(flags: argparse.Namespace, chosen: Loss | None) -> None:
    """Raise BadInput if a flag is set that is for other losses than the `chosen` one."""
    name = chosen.name if chosen else None
    wrong: dict[str, dict[str, Any]] = {}
    for field, owners in _owners_of_flags().items():
        if name not in owners:
            flag = _loss_named(owners[0]).flag
            wrong.setdefault(f"{flag} {_join_names(owners)}", {})[field] = getattr(flags, field)
    for owner, values in wrong.items():
        refuse_without(owner, values)


@cache
def _owners_of_flags() -> dict[str, tuple[str, ...]]:
    """Return the names of the losses that each flag of a loss is for."""
    owners: dict[str, tuple[str, ...]] = {}
    for loss in LOSSES:
        some = loss.owners()
        for field in fields(loss)[1:]:  # the first is the name
            owners[field.name] = (*owners.get(field.name, ()), *some.get(field.name, loss.names))
    return owners


def _loss_named(name: str) -> type[Loss]:
    return next(loss for loss in LOSSES if name in loss.names)


def _join_names(names: Sequence[str]) -> str:
    """Return names as text: "dpo", "dpo or simpo", "dpo, simpo or orpo"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def logged_names() -> tuple[str, ...]:
    """Return the names in the log of what runs minimise, the one of a token's loss last."""
    return tuple(name for loss in LOSSES for name in loss.logged)
