"""Choosing parameters by part or pattern: what trains, at which rate, and in which norm."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.freeze import PARTS, compile_pattern, global_name
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


def part_of(name: str) -> str:
    """Which of :data:`mcore_qwen3vl.model.freeze.PARTS` a parameter belongs to.

    Args:
        name: as in ``named_parameters()``, with or without the ``module.`` of Megatron's wrappers.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return next(part for part, pattern in PARTS.items() if re.match(pattern, name))


def choose_trainable(
    model: Qwen3VLModel, frozen: Sequence[str], trainable: Sequence[str]
) -> set[str]:
    """Set ``requires_grad`` of one pipeline chunk's parameters, before Megatron wraps it.

    Args:
        model: the chunk.
        frozen: parts or patterns of what is not trained.
        trainable: if any, parts or patterns of what alone is trained.

    Returns:
        The patterns that selected something here; see :func:`check_choice`.

    Raises:
        BadInput: a pattern is neither a part nor a regular expression.
    """
    compiled = {pattern: compile_pattern(pattern) for pattern in (*frozen, *trainable)}
    used = set()
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        selecting = {pattern for pattern, regex in compiled.items() if regex.match(name)}
        chosen = not trainable or not selecting.isdisjoint(trainable)
        parameter.requires_grad_(chosen and selecting.isdisjoint(frozen))
        used |= selecting
    return used


def check_choice(patterns: Sequence[str], used: set[str], trains: bool) -> None:
    """Refuse a pattern that selects nothing on any rank, and to train nothing; for all ranks.

    Args:
        patterns: of the command line.
        used: those that selected something on this rank.
        trains: whether this rank trains any parameter.

    Raises:
        BadInput: naming the patterns.
    """
    everywhere: list[tuple[set[str], bool]] = [(set(), False)] * dist.get_world_size()
    dist.all_gather_object(everywhere, (used, trains))
    unused = sorted(set(patterns).difference(*(used for used, _ in everywhere)))
    if unused:
        raise BadInput(
            f"--freeze/--trainable {' '.join(unused)} selects no parameter. Use "
            f"{', '.join(PARTS)}, or a regular expression for the start of names such as "
            "decoder.layers.0.mlp, visual.blocks, embedding or output_layer."
        )
    if not any(trains for _, trains in everywhere):
        raise BadInput("--freeze/--trainable leave no parameter to train: freeze less.")
