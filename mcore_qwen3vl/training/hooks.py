"""Where the run is woven into ``megatron.training``, whose loop has no callbacks.

Some of its module-level functions are wrapped, by name, and nothing is copied; a Megatron that
lacks one of them is refused at the start instead of training without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from mcore_qwen3vl.errors import BadInput

Wrapper = Callable[..., Any]
"""``(original, *args, **kwargs) -> result``, in place of ``original(*args, **kwargs)``."""


def wrap(module: Any, wrappers: dict[str, Wrapper]) -> None:
    """Replace functions of `module` by wrappers that are given the original.

    Raises:
        BadInput: the installed Megatron has no such function.
    """
    for name, wrapper in wrappers.items():
        original = getattr(module, name, None)
        if original is None:
            raise BadInput(
                f"{module.__name__}.{name} does not exist in the installed megatron-core, so "
                "training would not do what its flags say. Install the pinned version."
            )
        original = getattr(original, "__wrapped__", original)  # of an earlier run
        wrapped = functools.partial(wrapper, original)
        functools.update_wrapper(wrapped, original)
        setattr(module, name, wrapped)


def gather_items(
    original: Any, item: Any, dtype: torch.dtype, group: Any = None, *_: Any, **__: Any
) -> list[Any]:
    """In place of ``dist_signal_handler.all_gather_item``: every rank's `item`, with one wait.

    Megatron's waits for the device once a rank of the world, each iteration.
    """
    own = torch.full((1,), item, dtype=dtype, device=torch.cuda.current_device())
    everyone = own.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, own, group=group)
    return list(everyone.tolist())


def reduce_stat(original: Any, stat: float | Tensor | None, group: Any = None) -> float | None:
    """In place of ``reduce_max_stat_across_model_parallel_group``, with one wait for three."""
    group = mpu.get_model_parallel_group() if group is None else group
    missing = -1.0  # as Megatron marks a rank that has none
    device = torch.cuda.current_device()
    if isinstance(stat, Tensor):
        own = stat.detach().float().reshape(1).clone()
    else:
        own = torch.full((1,), missing if stat is None else stat, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    found = float(own.item())
    return None if found == missing else found
