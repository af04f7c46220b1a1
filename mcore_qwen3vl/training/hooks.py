"""Where the run is woven into ``megatron.training``, whose loop has no callbacks.

Some of its module-level functions are wrapped, by name, and nothing is copied; a Megatron that
lacks one of them is refused at the start instead of training without it.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.late import Late

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


def results_queue(original: Any, mp_mode: str = "spawn") -> queue.Queue[Any]:
    """In place of ``filesystem_async.get_write_results_queue``, for saves that this process awaits.

    Megatron's is held by a process of its own, which imports the program anew (600 MB for each
    rank) and stays for ever once its rank is killed. A save in the background needs that.
    """
    return queue.Queue()


class Signals:
    """Which ranks have received a signal, as all of them knew it a step ago."""

    def __init__(self) -> None:
        self._gathered: Late | None = None

    def gather(
        self, original: Any, item: Any, dtype: torch.dtype, group: Any = None, *_: Any, **__: Any
    ) -> list[Any]:
        """In place of ``dist_signal_handler.all_gather_item``, without a wait.

        Megatron's waits for the device once a rank of the world, each iteration.

        Returns:
            Every rank's item of the last call; nothing but zeros the first time.
        """
        own = torch.full((1,), item, dtype=dtype, device=torch.cuda.current_device())
        everyone = own.new_empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(everyone, own, group=group)
        before, self._gathered = self._gathered, Late(everyone)
        return [0] * len(everyone) if before is None else before.read()


class Stats:
    """The largest of the model-parallel ranks' numbers, some of which may have none."""

    def __init__(self) -> None:
        self._everyone_has: bool | None = None

    def reduce(
        self, original: Any, stat: float | Tensor | None, group: Any = None
    ) -> float | Tensor | None:
        """In place of ``reduce_max_stat_across_model_parallel_group``.

        Megatron's waits for the device three times. This one does not, where every rank has a
        number, which is asked once: the gradient norm is of all ranks, the learning rate the same.

        Returns:
            None if no rank has one.
        """
        group = mpu.get_model_parallel_group() if group is None else group
        missing = -1.0  # as Megatron marks a rank that has none
        if self._everyone_has is None:
            self._everyone_has = not _largest(stat is None, group).item()
        if self._everyone_has:
            return stat.detach().reshape(()) if isinstance(stat, Tensor) else stat
        found = float(_largest(missing if stat is None else stat, group).item())
        return None if found == missing else found


def _largest(stat: float | bool | Tensor, group: Any) -> Tensor:
    if isinstance(stat, Tensor):
        own = stat.detach().float().reshape(1).clone()
    else:
        dtype = torch.int32 if isinstance(stat, bool) else torch.float32
        own = torch.full((1,), stat, dtype=dtype, device=torch.cuda.current_device())
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own


def success_of_all(original: Any, success: bool, group: Any = None, *, fp16: bool) -> bool:
    """In place of ``logical_and_across_model_parallel_group``: only fp16's scaler skips a step."""
    everyone: bool = original(success, group=group) if fp16 else success
    return everyone
