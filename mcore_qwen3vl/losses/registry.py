"""Which losses there are.

The command line, the contract of a resume, the logs and rehearsals ask here. To delete a loss,
delete its file and its line in :data:`BUILT_IN`. To add one from another package, register a class
below :class:`.Loss` as an entry point of the group ``mcore_qwen3vl.loss_families``. Each command
line imports it, so it names torch lazily, as the losses here do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from itertools import groupby
from typing import Any

from mcore_qwen3vl.data.record_form import DetectedForm
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import add_flags, make_from_flags, stands_last
from mcore_qwen3vl.functions import RULE
from mcore_qwen3vl.losses.classify import Classify
from mcore_qwen3vl.losses.distillation import DistillationLoss
from mcore_qwen3vl.losses.embedding import Embedding
from mcore_qwen3vl.losses.kto import KtoLoss
from mcore_qwen3vl.losses.loss import Loss, refuse_without
from mcore_qwen3vl.losses.preference import PreferenceLoss
from mcore_qwen3vl.losses.reranker import Reranker
from mcore_qwen3vl.losses.reward import Reward
from mcore_qwen3vl.losses.tokens import TokenLoss, registered

BUILT_IN: tuple[type[Loss], ...] = (
    PreferenceLoss,
    KtoLoss,
    DistillationLoss,
    TokenLoss,
    Embedding,
    Reranker,
    Reward,
    Classify,
)
"""In the order of ``--help``."""

GROUP = "mcore_qwen3vl.loss_families"
"""The entry points of other packages' subclasses of :class:`.Loss`."""


@cache
def all_losses() -> tuple[type[Loss], ...]:
    """Return the losses of this package and of others; BadInput for one that cannot be used."""
    found = list(BUILT_IN)
    for entry in entry_points(group=GROUP):
        try:
            loss = entry.load()
        except Exception as error:  # importing runs the other package's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise BadInput(
                f"The entry point {entry.name} of {GROUP} is {entry.value}, which cannot be "
                f"imported: {reason}. Correct or remove the package that has it."
            ) from error
        if not (isinstance(loss, type) and issubclass(loss, Loss)):
            raise BadInput(
                f"The entry point {entry.name} of {GROUP} is {entry.value}, which is no subclass "
                "of mcore_qwen3vl.losses.loss.Loss. Correct or remove the package that has it."
            )
        if taken := {name for other in found for name in other.names} & set(loss.names):
            raise BadInput(
                f"The entry point {entry.name} of {GROUP} names a loss {', '.join(sorted(taken))}, "
                "as another loss does. Rename it in its package."
            )
        found.append(loss)
    return tuple(found)


def exchanging_losses() -> frozenset[str]:
    """Return the names of the losses that depend on which records share a micro-batch."""
    return frozenset(name for loss in all_losses() if loss.exchanges for name in loss.names)


def kind_of(flags: Mapping[str, Any]) -> type[Loss]:
    """Return the loss that `flags` name, by ``dest`` names; BadInput if there is no such loss."""
    if task := flags.get("task"):
        return loss_named(task)
    name = flags.get("loss") or TokenLoss.names[0]
    known = {name: loss for loss in all_losses() if loss.flag == "--loss" for name in loss.names}
    if name in known:
        return known[name]
    if ":" not in name and name not in (others := registered()):
        names = ", ".join(dict.fromkeys([*TokenLoss.names, *known, *others]))
        raise BadInput(
            f"--loss {name} is not known. There are {names}; or name a function as {RULE}."
        )
    return TokenLoss


def loss_of(flags: argparse.Namespace) -> Loss:
    """Make the loss that parsed flags describe."""
    return make_from_flags(kind_of(vars(flags)), flags, name=flags.task or flags.loss)


def help_of_loss() -> str:
    """Return the help of ``--loss``."""
    *others, tokens = (loss.help for loss in _in_order("--loss"))
    return ", ".join([*others, tokens])


def _in_order(flag: str) -> list[type[Loss]]:
    """Return the losses that `flag` names, the loss of tokens last."""
    losses = [loss for loss in all_losses() if loss.flag == flag]
    return sorted(losses, key=lambda loss: loss is TokenLoss)


def add_loss_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all losses, each once, and ``--task``."""
    seen = {"name"}
    with_flags = (loss for loss in all_losses() if loss.group)
    for title, group in groupby(with_flags, key=lambda loss: loss.group):
        losses, arguments = list(group), parser.add_argument_group(title)
        if any(loss.flag == "--task" for loss in losses) and "task" not in seen:
            tasks = _in_order("--task")
            names = [name for loss in tasks for name in loss.names]
            text = ". ".join(loss.help for loss in tasks)
            arguments.add_argument("--task", choices=names, help=text)
            seen.add("task")
        for last in (False, True):
            for loss in losses:
                others = {name for name, is_last in stands_last(loss).items() if is_last != last}
                add_flags(arguments, loss, leave_out=seen | others)
                seen |= stands_last(loss).keys() - others


def flags_of_losses() -> tuple[str, ...]:
    """Return the ``dest`` names of the flags of all losses."""
    return tuple(_owners_of_flags())


def refuse_other_losses_flags(flags: argparse.Namespace, chosen: Loss) -> None:
    """Raise BadInput if a flag is set that is for other losses than the `chosen` one."""
    wrong: dict[str, dict[str, Any]] = {}
    for field, owners in _owners_of_flags().items():
        if chosen.name not in owners:
            flag = loss_named(owners[0]).flag
            wrong.setdefault(f"{flag} {_join_names(owners)}", {})[field] = getattr(flags, field)
    for owner, values in wrong.items():
        refuse_without(owner, values)


@cache
def _owners_of_flags() -> dict[str, tuple[str, ...]]:
    """Return the names of the losses that each flag of a loss is for."""
    owners: dict[str, tuple[str, ...]] = {}
    for loss in all_losses():
        some = loss.owners()
        for field in fields(loss)[1:]:  # the first is the name
            owners[field.name] = (*owners.get(field.name, ()), *some.get(field.name, loss.names))
    return owners


def loss_named(name: str) -> type[Loss]:
    """Return the loss that has a value of ``--loss`` or ``--task`` among its names."""
    return next(loss for loss in all_losses() if name in loss.names)


def detected_form(flag: str | None = None) -> DetectedForm:
    """Return the form that the keys of each record tell.

    Its forms are those of the losses that `flag` names; None: of all losses.
    """
    losses = [loss for loss in reversed(all_losses()) if flag in (None, loss.flag)]
    return DetectedForm(tuple(loss.records for loss in losses if loss.records is not None))


def _join_names(names: Sequence[str]) -> str:
    """Return names as text: "dpo", "dpo or simpo", "dpo, simpo or orpo"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def logged_names() -> tuple[str, ...]:
    """Return the names in the log of what runs minimise; a distillation logs tokens' loss too."""
    losses = sorted(all_losses(), key=lambda loss: loss is TokenLoss)
    return tuple(name for loss in losses for name in loss.logged)
