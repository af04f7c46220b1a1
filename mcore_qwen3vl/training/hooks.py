"""Hooks into ``megatron.training``, whose loop has no callbacks: what the wrappers do.

We wrap some of its module-level functions by name, see :mod:`.step`, and copy nothing. If the
installed Megatron lacks one of them, the run refuses to start instead of training without it.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.settings.run import ComputeSettings
from mcore_qwen3vl.training.step import HOOKS

Wrapper = Callable[..., Any]
"""A function ``(original, *args, **kwargs) -> result`` that replaces ``original``."""


def wrap_all(wrappers: Mapping[str, Wrapper]) -> None:
    """Wrap the functions of :data:`HOOKS`; `wrappers` has a wrapper for each, by its name."""
    # All of them, because an earlier run in this process may have wrapped some.
    for name, module in HOOKS.items():
        wrap(import_module(module), name, wrappers[name])


def call_original(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's function as it is."""
    return original(*args, **kwargs)


def wrap(module: Any, name: str, wrapper: Wrapper) -> None:
    """Replace a function of `module`, which must have it; the wrapper receives the function."""
    original = getattr(module, name, None)
    if original is None:
        raise BadInput(
            f"{module.__name__}.{name} does not exist in the installed megatron-core, so training "
            "would not do what its flags say. Install the pinned version."
        )
    original = getattr(original, "__wrapped__", original)  # not an earlier run's wrapper
    setattr(module, name, update_wrapper(partial(wrapper, original), original))


def results_queue(original: Any, mp_mode: str = "spawn") -> queue.Queue[Any]:
    """Replace ``filesystem_async.get_write_results_queue``, for saves that this process waits for.

    Megatron's queue lives in a process of its own, which imports the program again (600 MB per
    rank) and never ends if its rank is killed. Only a save in the background needs that.
    """
    return queue.Queue()


class AsyncHostCopy:
    """An async host copy of a 1-D tensor's values, so that no step needs a host sync."""

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None
        self._values = values
        if self._event is not None:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event.record()

    def wait(self) -> list[float]:
        """Return the values; waits if they have not arrived, which a step later they have."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return list(self._values.tolist())


class Signals:
    """Tells all ranks, one step late, which of them have received a signal."""

    def __init__(self) -> None:
        self._gathered: AsyncHostCopy | None = None

    def gather_late(
        self, original: Any, item: Any, dtype: torch.dtype, group: Any = None, *_: Any, **__: Any
    ) -> list[Any]:
        """Return every rank's item of the call before; zeros in the first call."""
        # In place of `all_gather_item`, which takes a host sync per rank of the world each time.
        mine = torch.full((1,), item, dtype=dtype, device=torch.cuda.current_device())
        everyone = mine.new_empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(everyone, mine, group=group)
        before, self._gathered = self._gathered, AsyncHostCopy(everyone)
        return [0] * len(everyone) if before is None else before.wait()


class Stats:
    """Reduces a number to its maximum over the model-parallel ranks; some ranks may have none."""

    def __init__(self) -> None:
        self._everyone_has: bool | None = None

    def maximum(
        self, original: Any, stat: float | Tensor | None, group: Any = None
    ) -> float | Tensor | None:
        """Return the maximum, usually `stat` itself; None if no rank has a number.

        ``reduce_max_stat_across_model_parallel_group``, which this replaces, takes three host
        syncs. This one takes none if every rank has a number, which the first call finds out. No
        reduction is needed then: the gradient norm is already that of all ranks, and the learning
        rate is the same everywhere.
        """
        group = mpu.get_model_parallel_group() if group is None else group
        missing = -1.0  # Megatron's own mark for a rank that has none
        if self._everyone_has is None:
            self._everyone_has = not _all_reduce_maximum(stat is None, group).item()
        if self._everyone_has:
            return stat.detach().reshape(()) if isinstance(stat, Tensor) else stat
        largest = float(_all_reduce_maximum(missing if stat is None else stat, group).item())
        return None if largest == missing else largest


def _all_reduce_maximum(stat: float | bool | Tensor, group: Any) -> Tensor:
    """Return the largest value of the group's ranks, (1,), on the device."""
    if isinstance(stat, Tensor):
        largest = stat.detach().float().reshape(1).clone()
    else:
        dtype = torch.int32 if isinstance(stat, bool) else torch.float32
        largest = torch.full((1,), stat, dtype=dtype, device=torch.cuda.current_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def success_of_all(original: Any, success: bool, group: Any = None, *, fp16: bool) -> bool:
    """Replace ``logical_and_across_model_parallel_group``, which only fp16 needs."""
    # A rank's step fails only if fp16's loss scaler skips it.
    return original(success, group=group) if fp16 else success


class NormCheck:
    """Stops a run at a non-finite gradient norm: one step late, but before that step is saved.

    Megatron's own check takes two host syncs per gradient bucket, inside the backward pass.
    """

    def __init__(self, explain: Callable[[int], FloatingPointError]) -> None:
        self._explain = explain
        self._pending: tuple[int, AsyncHostCopy] | None = None

    def add(self, norm: float | Tensor | None, iteration: int) -> None:
        """Check the norm that was added before, and start copying this one to the host.

        It raises FloatingPointError if that norm is infinite or NaN. `norm` is one value; None if
        nothing trains on this rank's pipeline.
        """
        self.settle()
        if norm is not None:
            values = norm.detach().reshape(1) if isinstance(norm, Tensor) else torch.tensor([norm])
            self._pending = iteration, AsyncHostCopy(values)

    def settle(self) -> None:
        """Check the norm that was added last, waiting for it if necessary; see :meth:`add`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration, (norm,) = pending[0], pending[1].wait()
        if not math.isfinite(norm):
            raise self._explain(iteration)


class LossScaleSkips:
    """Counts the steps whose update fp16's loss scaler skips, because a gradient overflowed.

    As with Megatron alone, such a step counts as a step and its samples as used, while weights,
    optimizer and the learning rate's schedule stay where they are.
    """

    def __init__(self, compute: ComputeSettings) -> None:
        self._compute = compute
        self._steps = self._skipped = self._reported = 0

    def __bool__(self) -> bool:  # whether there is anything to say at the end of a run
        return self._skipped > 0

    def add(self, skipped: int) -> None:
        """Count a step; `skipped` is 1 if it was skipped, else 0."""
        self._steps += 1
        self._skipped += skipped

    def report(self) -> dict[str, float]:
        """Return the number of steps that were skipped since the last report."""
        since, self._reported = self._skipped - self._reported, self._skipped
        return {"skipped steps": since}

    def __str__(self) -> str:
        scale = self._compute.loss_scale or self._compute.initial_loss_scale
        lower = "--loss-scale" if self._compute.loss_scale else "--initial-loss-scale"
        return (
            f"{self._skipped} of {self._steps} steps were skipped, because gradients overflowed in "
            "fp16 at the loss scale: they changed no weight, and the learning rate's schedule does "
            f"not count them. A {lower} below {scale:g} skips fewer, and --bf16 none"
        )


PIECE = 2**26  # values; 256 MB of float32
_MARKS = ("sequence_parallel", "average_gradients_across_tp_domain")  # of what is reduced
Named = tuple[str, nn.Parameter]


def reduce_in_pieces(original: Any, model: Sequence[Any], *args: Any) -> None:
    """Replace ``_allreduce_non_tensor_model_parallel_grads``; the sums are the same.

    mcore calls it in ``finalize_model_grads``, after the backward pass and before our division.
    Some parameters are replicated on every TP rank, while each rank's gradient comes from a part of
    the tokens or of the heads. mcore sums up the gradients of

    * norms of queries and keys, which it knows by their names, with SP and without;
    * what is marked ``sequence_parallel``, under SP: its router marks itself, and we mark other
      norms (``model/decoder/norm.py``) and the vision tower (``model/vision.py``). Without SP
      every TP rank has all tokens, and their gradients are whole.

    It takes the mean of what is marked ``average_gradients_across_tp_domain``: without SP the tower
    and a delta net's norm (``model/decoder/delta_net.py``). LoRA's undivided factors have the marks
    of their weight, or the first (``model/lora_modules.py``).

    mcore copies all these gradients into one tensor before it reduces them. For the tower that
    takes 2.2 GB, at the moment of peak memory of an MoE model under full recompute.
    """
    for chunk in model:
        for parameters in _pieces(chunk.named_parameters()):
            # What mcore's function reads of a model chunk.
            piece = SimpleNamespace(
                ddp_config=chunk.ddp_config, named_parameters=partial(iter, parameters)
            )
            original([piece], *args)


def _pieces(parameters: Iterator[Named]) -> Iterator[list[Named]]:
    """Divide parameters, in order, into pieces by the size of those that have a mark."""
    piece: list[Named] = []
    size = 0
    for name, parameter in parameters:
        # Norms of queries and keys without SP are reduced too, and are too small to count.
        reduced = any(getattr(parameter, mark, False) for mark in _MARKS)
        counts = parameter.numel() if reduced else 0
        # A single parameter may be larger than a piece.
        if size and size + counts > PIECE:
            yield piece
            piece, size = [], 0
        piece.append((name, parameter))
        size += counts
    if piece:
        yield piece
