"""Process groups in which only this rank exists; the others are assumed to send what it sends.

Host tensors get the values that follow from this: a gather returns this rank's values for every
member. Device tensors are only counted, but those of few integers are filled in too. A broadcast
from another rank brings nothing, so rehearse ranks that read their own batches.

A program that starts a process for every rank passes their shared store to ``init_process_group``.
Then a message from one rank to another arrives if it is on the host or has few integers, for
example the shapes that pipeline stages tell each other. Collectives remain as above.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Work
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from .device import Traffic, Unavailable
from .integers import host_view

REPLACED = ("init_process_group", "new_group", "_store_based_barrier")
"""Functions of ``torch.distributed.distributed_c10d`` that :func:`install` replaces."""

TESTED_TORCH = "2.13.0"
_BACKEND = "simulated"
_SMALL = 1 << 20  # elements; device tensors of fewer integers are filled in
_traffic: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 1])


def traffic() -> list[Traffic]:
    """Return what every group was handed since the last :func:`take_traffic`."""
    return [Traffic(*key, *counts) for key, counts in _traffic.items()]


def take_traffic() -> list[Traffic]:
    """Return what every group was handed since the last call, most bytes first."""
    new = sorted(traffic(), key=lambda t: -t.size)
    _traffic.clear()
    return new


def install() -> None:
    """Make ``torch.distributed`` create groups of this kind, whatever backend is requested.

    The world size is the one passed to ``init_process_group``, else WORLD_SIZE. Groups still report
    the backend that was requested. If a store is passed, a receiver waits for its sender.

    Raises:
        Unavailable: the installed PyTorch lacks a function that this one replaces.
    """
    if getattr(c10d.init_process_group, "simulated_gpu", False):
        return
    for name in REPLACED:
        if not hasattr(c10d, name):
            raise Unavailable(
                f"torch.distributed.distributed_c10d.{name} does not exist in torch "
                f"{torch.__version__}, so the simulated GPU cannot stand in for other ranks. "
                f"Install torch {TESTED_TORCH}, with which it was tested."
            )
    dist.Backend.register_backend(_BACKEND, _make_group, devices=["cpu", "cuda"])
    start, new = c10d.init_process_group, c10d.new_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        **_: Any,
    ) -> None:
        world_size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        if store is not None and timeout is not None:
            store.set_timeout(timeout)
        start(_BACKEND, world_size=world_size, rank=rank, store=store or dist.HashStore())
        _set_backend_and_description(c10d._get_default_group(), "world", backend or "nccl")

    def new_group(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **_: Any,
    ) -> Any:
        group = new(ranks, backend=_BACKEND, group_desc=group_desc)
        if isinstance(group, OneRankGroup):
            _set_backend_and_description(
                group, group_desc or "group", backend or dist.get_backend()
            )
            members = dist.get_process_group_ranks(group)
            group.span = members[-1] - members[0] + 1
        return group

    init_process_group.simulated_gpu = True  # type: ignore[attr-defined]
    c10d._store_based_barrier = lambda *args, **kwargs: None  # it waits for ranks that do not exist
    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_group  # type: ignore[attr-defined]


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> OneRankGroup:
    """Make a group as ``register_backend`` asks for; a store of this process alone is left out."""
    alone = isinstance(store._underlying_non_prefix_store, dist.HashStore)
    return OneRankGroup(rank, size, None if alone else store)


def _set_backend_and_description(group: Any, description: str, backend: Any) -> None:
    """Set what ``get_backend`` returns, the first requested backend, and the description."""
    asked = str(backend).split(",")[0].split(":")[-1]  # of "cpu:gloo,cuda:nccl", for example
    c10d._world.pg_map[group] = (asked, c10d._world.pg_map[group][1])
    group.description = description + (" (gloo)" if asked == "gloo" else "")


def _finished_work(result: Any) -> Work:
    """Return work that is already finished."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(result))
    return _create_work_from_future(future)


_ProcessGroup: Any = dist.ProcessGroup  # its type stubs have overloads that Python never calls


class _Receipt(Work):
    """Receives when it is waited for, so that the order of the operations of a batch is free."""

    def __init__(self, receive: Callable[[], None]) -> None:
        super().__init__()
        self._receive = receive

    def wait(self, timeout: Any = None) -> bool:
        self._receive()
        return True


class OneRankGroup(_ProcessGroup):
    """A group of any size in which this rank is the only process, or exchanges messages alone."""

    description = "group"

    def __init__(self, rank: int, size: int, store: Any = None) -> None:
        """
        Args:
            store: the group's own part of the store that all its ranks share; None: this rank is
                the only process.
        """
        super().__init__(rank, size)
        self._size = size
        self._store = store
        self._messages: Counter[str] = Counter()  # number so far, by sender, receiver and tag
        self.span = size  # ranks from the first member to the last one

    def getBackendName(self) -> str:
        return _BACKEND

    def _get_backend(self, device: torch.device) -> OneRankGroup:
        """Return the group itself, which torch 2.15 asks whether it can coalesce messages."""
        return self

    def _start_coalescing(self, device: Any) -> None: ...

    def _count_and_finish(self, operation: str, handed: Any, result: Any = ()) -> Work:
        """Count an operation by the tensors it was handed; return finished work with `result`."""
        entry = _traffic[f"{self.description}[{self._size}]", operation]
        # Calls, bytes and span, the last three fields of `Traffic`.
        entry[0] += 1
        entry[1] += sum(t.numel() * t.element_size() for t in tree_leaves(handed))
        entry[2] = self.span
        return _finished_work(result)

    def count(self, operation: str, handed: Any) -> None:
        """Count an operation of a library that exchanges tensors without this group's methods."""
        self._count_and_finish(operation, [t for t in handed if t is not None])

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = tree_leaves(tensors)
        for tensor in tensors:
            if not tensor.is_cuda and opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(self._size)  # the sum of as many equal values as there are ranks
        return self._count_and_finish("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._count_and_finish("broadcast", tensors, tree_leaves(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _copy_to_all(outputs, inputs)
        return self._count_and_finish("all_gather", outputs, outputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for out, source in zip(outputs, inputs, strict=True):
            if _has_values(source):
                out.view(self._size, -1).copy_(source.reshape(1, -1).expand(self._size, -1))
        return self._count_and_finish("all_gather", outputs, outputs)

    def _allgather_base(self, out: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([out], [source])

    all_gather_single = _allgather_base

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, out: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self._count_and_finish("reduce_scatter", [source], [out])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._count_and_finish("reduce_scatter", inputs, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter

    def alltoall_base(
        self, out: Tensor, source: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Work:
        for name, splits, tensor in (("output", out_splits, out), ("input", in_splits, source)):
            sizes = [int(n) for n in splits] if splits is not None else []
            if sizes and sum(sizes) != tensor.shape[0]:
                raise ValueError(f"all_to_all: {name} splits {sizes} of {tuple(tensor.shape)}")
        return self._count_and_finish("all_to_all", [source], [out])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._count_and_finish("all_to_all", inputs, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _copy_to_all(outputs, inputs)
        return self._count_and_finish("gather", inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._count_and_finish("scatter", outputs)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._count_and_finish("reduce", tensors, tensors)

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        for tensor in tensors if self._store else ():
            if _has_values(tensor):
                values = host_view(tensor) if tensor.is_cuda else tensor
                octets = values.detach().contiguous().view(-1).view(torch.uint8)
                self._store.set(
                    self._next_message_key(self.rank(), to, tag), octets.numpy().tobytes()
                )
        return self._count_and_finish("send", tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        work = self._count_and_finish("recv", tensors, tensors)
        wanted = [tensor for tensor in tensors if _has_values(tensor)]
        if self._store and source >= 0:
            keys = [self._next_message_key(source, self.rank(), tag) for _ in wanted]
            return _Receipt(partial(self._fill_from_messages, wanted, keys))
        for tensor in wanted:
            tensor.zero_()  # nothing was sent, and what was in memory must not count
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    def _next_message_key(self, sender: int, receiver: int, tag: int) -> str:
        """Return the key of the next message, which both sides count."""
        way = f"{sender} to {receiver}, tag {tag}"
        self._messages[way] += 1
        return f"{way}, number {self._messages[way]}"

    def _fill_from_messages(self, tensors: list[Tensor], keys: list[str]) -> None:
        """Give each tensor the values under its key, and wait until the sender has set them."""
        for tensor, key in zip(tensors, keys, strict=True):
            values = torch.frombuffer(bytearray(self._store.get(key)), dtype=tensor.dtype)
            (host_view(tensor) if tensor.is_cuda else tensor).copy_(values.view(tensor.shape))

    def barrier(self, opts: Any = None) -> Work:
        return self._count_and_finish("barrier", [])

    def _end_coalescing(self, device: Any) -> Work:
        return _finished_work([])


def _copy_to_all(outputs: Any, inputs: Any) -> None:
    """Copy this rank's values to the place of every member, if they are known."""
    for parts, source in zip(outputs, inputs, strict=False):  # only a gather's root has outputs
        for part in parts if _has_values(source) else ():
            part.copy_(source)


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has true values: any on the host, on the device small integers."""
    known = not tensor.is_cuda or (not tensor.is_floating_point() and tensor.numel() < _SMALL)
    return known and tensor.numel() > 0
