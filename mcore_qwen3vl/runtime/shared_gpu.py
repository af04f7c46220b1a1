"""Process groups of several ranks on one GPU, which NCCL refuses.

Each operation copies its tensors to the host, where gloo exchanges them, and back. Kernels, streams
and layouts are those of any other run on CUDA, so a single GPU can compare a layout with Hugging
Face. Speed and NCCL are not what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

BACKEND = "staged"
"""The name that ``torch.distributed`` knows these groups by, once :func:`register` was called."""

_HALF = (torch.bfloat16, torch.float16)
_TAG = 1 << 20  # of parts of an exchange, apart from messages of callers


def register() -> str:
    """Let ``torch.distributed`` create these groups, and return the backend's name."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
    return BACKEND


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> StagedGroup:
    return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class _Exchange(Work):
    """Work on the host, after which `finish` brings its results to the device."""

    def __init__(self, works: Sequence[Work] = (), finish: Callable[[], object] | None = None):
        super().__init__()
        self._works = works
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish = (), None  # a second call does nothing
        return True


_ProcessGroup: Any = dist.ProcessGroup  # its type stubs have overloads that Python never calls


class StagedGroup(_ProcessGroup):
    """A group whose ranks exchange through the host.

    Everything but messages between two ranks is over when its method returns. Sums of half
    precision are made in float32, as their order differs from NCCL's in any case.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size
        self._gloo = gloo

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> StagedGroup:
        """Return the group itself, which torch 2.15 asks whether it can coalesce messages."""
        return self

    def _start_coalescing(self, device: Any) -> None: ...

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            _write(tensor, self._reduce_on_host(tensor, opts))
        return _Exchange()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Work:
        for tensor in tensors:
            total = self._reduce_on_host(tensor, opts)
            if self.rank() == opts.rootRank:
                _write(tensor, total)
        return _Exchange()

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        for tensor in tensors:
            octets = _octets(tensor)
            self._gloo.broadcast([octets], opts).wait()
            _write(tensor, octets)
        return _Exchange()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for parts, source in zip(outputs, inputs, strict=True):
            for part, octets in zip(parts, self._gather_octets(source), strict=True):
                _write(part, octets)
        return _Exchange()

    def _allgather_base(self, out: Tensor, source: Tensor, opts: Any = None) -> Work:
        _write(out, torch.cat(self._gather_octets(source)))
        return _Exchange()

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for out, source in zip(outputs, inputs, strict=True):
            self._allgather_base(out, source)
        return _Exchange()

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        received = [self._gather_octets(source) for source in inputs]
        if self.rank() == opts.rootRank:
            for parts, all_octets in zip(outputs, received, strict=True):
                for part, octets in zip(parts, all_octets, strict=True):
                    _write(part, octets)
        return _Exchange()

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        for i, out in enumerate(outputs):
            octets = _empty_octets(out)
            parts = [[_octets(part) for part in inputs[i]]] if inputs else []
            self._gloo.scatter([octets], parts, opts).wait()
            _write(out, octets)
        return _Exchange()

    def _reduce_scatter_base(self, out: Tensor, source: Tensor, opts: Any = None) -> Work:
        _write(out, self._reduce_on_host(source, opts).view(self._size, -1)[self.rank()])
        return _Exchange()

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for out, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(out, torch.stack([part.detach() for part in parts]), opts)
        return _Exchange()

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for out, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(out, source, opts)
        return _Exchange()

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, out: Tensor, source: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Work:
        sent = list(_octets(source).split(self._byte_counts(source, in_splits)))
        received = list(_empty_octets(out).split(self._byte_counts(out, out_splits)))
        self._exchange(received, sent)
        _write(out, torch.cat(received))
        return _Exchange()

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        received = [_empty_octets(out) for out in outputs]
        self._exchange(received, [_octets(source) for source in inputs])
        for out, octets in zip(outputs, received, strict=True):
            _write(out, octets)
        return _Exchange()

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        return _Exchange([self._gloo.send([_octets(tensor)], to, tag) for tensor in tensors])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        octets = _empty_octets(tensor)
        received = self._gloo.recv([octets], source, tag)
        return _Exchange([received], lambda: _write(tensor, octets))

    def barrier(self, opts: Any = None) -> Work:
        self._gloo.barrier().wait()
        return _Exchange()

    def _end_coalescing(self, device: Any) -> Work:
        return _Exchange()

    def _reduce_on_host(self, tensor: Tensor, opts: Any) -> Tensor:
        """Reduce a copy on the host; gloo has no mean."""
        on_host = _on_host(tensor)
        on_host = on_host.float() if on_host.dtype in _HALF else on_host
        options: Any = dist.AllreduceOptions()  # which asks for a sum
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        if opts is not None and not mean:
            options.reduceOp = opts.reduceOp
        self._gloo.allreduce([on_host], options).wait()
        return on_host / self._size if mean else on_host

    def _gather_octets(self, source: Tensor) -> list[Tensor]:
        """Return the bytes of every rank's tensor, on the host."""
        octets = _octets(source)
        parts = [torch.empty_like(octets) for _ in range(self._size)]
        self._gloo.allgather([parts], [octets]).wait()
        return parts

    def _byte_counts(self, tensor: Tensor, splits: Any) -> list[int]:
        """Return how many bytes of `tensor` belong to each rank; `splits` counts its rows."""
        if splits is None or not len(splits):
            splits = [len(tensor) // self._size] * self._size
        row = tensor[:1].numel() * tensor.element_size() if len(tensor) else 0
        return [int(rows) * row for rows in splits]

    def _exchange(self, received: list[Tensor], sent: list[Tensor]) -> None:
        """Give each rank its part; gloo has no exchange of unequal parts of every type."""
        works = []
        for other in range(self._size):
            if other == self.rank():
                received[other].copy_(sent[other])
                continue
            if sent[other].numel():
                works.append(self._gloo.send([sent[other].contiguous()], other, _TAG))
            if received[other].numel():
                works.append(self._gloo.recv([received[other]], other, _TAG))
        for work in works:
            work.wait()


def _on_host(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host, where gloo may write."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _octets(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor on the host, as bytes."""
    return _on_host(tensor).view(-1).view(torch.uint8)


def _empty_octets(tensor: Tensor) -> Tensor:
    """Return bytes on the host for what the tensor will hold."""
    return torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Write values, or the bytes of an equal tensor, to the device."""
    target = tensor.detach()  # autograd must not see the copy
    if values.dtype == torch.uint8 and tensor.dtype != torch.uint8:
        values = values.view(tensor.dtype)
    target.copy_(values.view(tensor.shape))
