"""Resume with expert parallelism from a checkpoint without it, or the other way round.

mcore gives experts an optimizer of their own if EP divides them, and otherwise one optimizer to all
parameters. A checkpoint holds the parameter groups of each optimizer. A group's values (learning
rates, weight decay, step) do not depend on that, nor do the tensors' places in the checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def take_other_chains(optimizer: Any) -> None:
    """Let a chain of distributed optimizers load the state of a chain of another length.

    Args:
        optimizer: mcore's optimizer. It stays as it is unless it is a chain of distributed ones.
    """
    parts = getattr(optimizer, "chained_optimizers", [])
    if not parts or not all(isinstance(part, DistributedOptimizer) for part in parts):
        return
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_any(state_dict: dict[Any, Any]) -> None:
        load(regrouped(state_dict, len(parts)))

    optimizer.load_state_dict = load_any


def regrouped(state: dict[Any, Any], parts: int) -> dict[Any, Any]:
    """Rearrange `state` for a chain of `parts` optimizers.

    Args:
        state: one optimizer's state, or the states of several by number. All but ``param_state``
            is as the checkpoint has it; ``param_state`` is as this chain requested it.
        parts: number of optimizers that will load it.
    """
    numbers = sorted(key for key in state if isinstance(key, int))
    saved = [state] if "optimizer" in state else [state[number] for number in numbers]
    if len(saved) == parts:
        return state
    groups = [group for one in saved for group in one["optimizer"]["param_groups"]]
    both = [{**group, "is_expert_parallel": flag} for flag in (True, False) for group in groups]
    said = {key: value for key, value in saved[0].items() if key not in (*numbers, "param_state")}
    said |= {"optimizer": {**saved[0]["optimizer"], "param_groups": [*both, *groups]}}
    asked = [state] if parts == 1 else [state.get(number, {}) for number in range(parts)]
    # A rank may own none of a small optimizer's parameters.
    owned = [{key: one[key] for key in ("param_state",) if key in one} for one in asked]
    chain = {number: {**said, **own} for number, own in enumerate(owned)}
    return chain[0] if parts == 1 else chain
