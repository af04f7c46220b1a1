"""One rank of a program on the simulated GPU: what it does, and what its memory holds.

What it does are the intervals of :class:`Rank`: host syncs, launches, traffic and work. FLOPs of
matmuls and attention are counted from the operators' shapes, by PyTorch's own formulas where it has
them. A multiply-add counts as two; recomputed work counts again, unlike in an MFU. Every other
operator that launches something is counted by the bytes of its tensors, each read or written once.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import isfunction
from math import prod
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from . import groups
from .device import (
    COUNTERS,
    Device,
    Interval,
    Report,
    Routing,
    Unavailable,
    is_preloaded,
    place_of,
)
from .integers import TrueIntegers, answer_sizes_from_host, host_view

_LEVELS = {"used", "peak_used", "pinned", "peak_pinned"}  # counters of a level, not of events

current: Rank | None = None
"""The rank that this process is; None outside :func:`one_rank`."""


class Rank:
    """This process's rank, which records the intervals of its program."""

    def __init__(self) -> None:
        self.device = Device()
        self.report = Report()
        self.work = CountWork(self.device.count_launches)
        self._started = time.monotonic()
        self._before = dict.fromkeys(COUNTERS, 0)

    def end_interval(self, name: str) -> Interval:
        """Record what happened since the last interval ended."""
        counters = self.device.counters()
        change = {n: v if n in _LEVELS else v - self._before[n] for n, v in counters.items()}
        interval = Interval(
            name,
            seconds=time.monotonic() - self._started,
            allocated=torch.cuda.memory_allocated(),
            peak=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.max_memory_reserved(),
            counters=change,
            host_syncs=self.device.take_host_syncs(),
            traffic=groups.take_traffic(),
            flops={kind: n for kind, n in self.work.counts.items() if kind in KINDS},
            one_key=self.work.counts[ONE_KEY],
            moved=self.work.counts[BYTES],
            fused=self.work.counts[FUSED],
            launches=self.device.take_launches(),
        )
        self.work.counts.clear()
        self._before = counters
        self._started = time.monotonic()
        self.report.intervals.append(interval)
        return interval

    def tally(self) -> Counter[str]:
        """Return the work of this interval so far.

        Returns:
            The counts of :class:`.CountWork`; ``launches``, without those that compiled functions
            save, and ``host_syncs``; and the bytes of each :class:`.Traffic`, by its key.
        """
        now = self.device.counters()
        host = {name: now[name] - self._before[name] for name in ("launches", "host_syncs")}
        host["launches"] -= self.work.counts[FUSED]
        sent = {t.key: t.size for t in groups.traffic()}
        return Counter({**self.work.counts, **host, **sent})


@contextmanager
def one_rank(rank: int = 0, world_size: int = 1, routing: Routing = "uniform") -> Iterator[Rank]:
    """Act as one rank of `world_size`, without initialising ``torch.distributed``.

    Inside, device integers have true values and process groups are :class:`.groups.OneRankGroup`.

    Raises:
        Unavailable: this process does not run on the simulated GPU.
    """
    global current
    if not is_preloaded():
        raise Unavailable(
            "This process does not run on the simulated GPU: start it with python -m "
            f"{__package__}, or call {__package__}.start_again() first."
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    groups.install()
    answer_sizes_from_host()
    current = Rank()
    try:
        with TrueIntegers(routing), current.work:
            yield current
    finally:
        current = None


Frames = list[dict[str, Any]]
"""Stack frames of Python and the autograd engine, innermost first: filename, line, name."""


def record_allocations() -> None:
    """Let PyTorch's allocator keep its whole history, which :class:`History` replays."""
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=4_000_000
    )


@dataclass(frozen=True)
class Moment:
    """One point of the history."""

    seconds: float  # host time since the first allocation
    allocated: int  # bytes
    sizes: dict[str, int]  # bytes by class, largest first


class History:
    """The allocator's history since :func:`record_allocations`; it is freed with this object."""

    def __init__(
        self, classify: Callable[[Frames], str], owners: Mapping[int, str] | None = None
    ) -> None:
        """
        Args:
            classify: returns an allocation's class from its frames.
            owners: class of each storage that is alive at the end, by its address; it takes
                precedence over `classify`.
        """
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        self._trace = [e for e in trace if e["action"] in ("alloc", "free_completed", "oom")]
        lasting: dict[int, int] = {}
        for i, event in enumerate(self._trace):
            if event["action"] == "alloc":
                lasting[event["addr"]] = i  # an address may be used again
            elif event["action"] == "free_completed":
                lasting.pop(event["addr"], None)
        at = {i: (owners or {}).get(address) for address, i in lasting.items()}
        self._classes = [
            (at.get(i) or classify(e.get("frames", []))) if e["action"] == "alloc" else ""
            for i, e in enumerate(self._trace)
        ]

    def peak(self) -> Moment:
        """Return the moment when most was allocated; one of zero bytes if nothing was."""
        return next(iter(self.over_time(1)), Moment(0.0, 0, {}))

    def last_refused(self) -> Moment | None:
        """Return the moment when an allocation was last refused for good; None if none was."""
        last = max((i for i, e in enumerate(self._trace) if e["action"] == "oom"), default=None)
        return None if last is None else self._snapshots([last])[0]

    def over_time(self, points: int = 400) -> list[Moment]:
        """Return the peak of each of `points` stretches with equally many events."""
        size = max(-(-len(self._trace) // points), 1)
        used = 0
        best: dict[int, tuple[int, int]] = {}
        for i, _, change in self._changes():
            used += change
            stretch = i // size
            if stretch not in best or used > best[stretch][0]:
                best[stretch] = (used, i)
        return self._snapshots([i for _, i in best.values()])

    def _snapshots(self, indices: list[int]) -> list[Moment]:
        """Return the moments of the events at `indices`, in the order of events."""
        moments, wanted = [], set(indices)
        sizes: Counter[str] = Counter()
        started = self._trace[0]["time_us"] if self._trace else 0
        for i, name, change in self._changes():
            sizes[name] += change
            if i in wanted:
                by_holder = {n: s for n, s in sizes.most_common() if s}
                seconds = (self._trace[i]["time_us"] - started) / 1e6
                moments.append(Moment(seconds, sum(by_holder.values()), by_holder))
        return moments

    def _changes(self) -> Iterator[tuple[int, str, int]]:
        """Yield (index, class, added bytes) of each event; frees of older memory add nothing."""
        live: dict[int, tuple[str, int]] = {}
        for i, event in enumerate(self._trace):
            if event["action"] == "alloc":
                name, size = self._classes[i], int(event["size"])
                live[event["addr"]] = name, size
                yield i, name, size
            elif event["action"] == "free_completed" and event["addr"] in live:
                name, size = live.pop(event["addr"])
                yield i, name, -size
            else:
                yield i, "", 0


def line_of(frames: Frames) -> str:
    """Return the innermost line outside PyTorch, or ``autograd`` if there is none."""
    return place_of(((f["filename"], f["line"], f["name"]) for f in frames), 1)


KINDS = ("gemm", "attention", "convolution")
ONE_KEY = "attention of one key"
"""The key of the FLOPs that attention would take if each of its queries had one key."""
BYTES = "bytes"
"""The key of the bytes, beside :data:`KINDS`."""
FUSED = "fused"
"""The key of the launches that ``torch.compile`` would save; see :func:`count_compiled`."""
BACKWARD_OVER_FORWARD = 2.5  # five matmuls instead of two: the scores are recomputed
_TE_EXTENSION = "transformer_engine_torch"
_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")


class CountWork(TorchDispatchMode):
    """A mode that adds up what runs inside, by :data:`KINDS`, :data:`BYTES` and :data:`FUSED`."""

    active: CountWork | None = None

    def __init__(self, launched: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._launched = launched
        self._within_one = False

    def __enter__(self) -> Self:
        CountWork.active = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        CountWork.active = None

    @contextmanager
    def one_kernel(self, tensors: Iterable[Any]) -> Iterator[list[Any]]:
        """Count what runs inside as one kernel that reads `tensors` and writes the yielded list.

        Matmuls and attention still count by their FLOPs.
        """
        if self._within_one:  # part of the outer one, which counts
            yield []
            return
        made: list[Any] = []
        before, self._within_one = self._launched(), True
        try:
            yield made
        finally:
            self._within_one = False
        self.counts[BYTES] += sum(sizes_of([*tensors, *made]))
        self.counts[FUSED] += max(self._launched() - before - 1, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._launched()
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        if func.namespace == "torch_attn":
            self.counts.update(_varlen_attention_work(packet.__name__, args))
        elif packet.__name__.startswith("_scaled_dot_product"):
            self.counts.update(_dense_attention_work(packet.__name__, args))
        elif packet.__name__ == "_grouped_mm":
            # (T, K) and (E, K, N), or for weight gradients (M, T) and (T, N)
            self.counts["gemm"] += 2 * args[0].numel() * args[1].shape[-1]
        elif formula is not None and packet.__name__ in _GEMMS:
            # PyTorch's formulas do not take the output's dtype.
            operands = [a for a in args if isinstance(a, Tensor)]
            self.counts["gemm"] += formula(*operands, out_val=result)
        elif formula is not None:
            kind = "convolution" if "conv" in packet.__name__ else "attention"
            self.counts[kind] += formula(*args, **(kwargs or {}), out_val=result)
        elif not self._within_one and self._launched() > before:  # unlike a view
            self.counts[BYTES] += _bytes_moved(func, args, result)
        return result


_LOOKUPS = {"gather", "index", "index_select", "embedding"}
"""Operators that read as much of their first tensor as they give."""
_ADDITIONS = {"scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_"}
"""Operators that change as much of their first tensor as their last one holds."""
_OVERWRITING = {"zero_", "fill_", "copy_", "_foreach_copy_"}
"""Operators that do not read their first tensor."""

RARELY_WRITING: set[str] = set()
"""Operators of a program that touch their tensors for some values only, and are counted as none."""


def _bytes_moved(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    name = func._overloadpacket.__name__
    if name in RARELY_WRITING:
        return 0
    pairs = zip(func._schema.arguments, args, strict=False)
    changed = [a for argument, a in pairs if argument.alias_info and argument.alias_info.is_write]
    written = sum(sizes_of(changed or [result]))
    others = sum(sizes_of(args[1:]))
    if name in _LOOKUPS:
        return others + 2 * written
    if name in _ADDITIONS:
        tensors = [a for a in args[1:] if isinstance(a, Tensor)]
        touched = sum(sizes_of(tensors[-1:]))
        return others + 2 * touched
    return written + others + (0 if name in _OVERWRITING else sum(sizes_of(args[:1])))


def sizes_of(values: Iterable[Any]) -> Iterator[int]:
    """Yield the bytes of each tensor in nested lists and tuples; what is expanded counts once."""
    for value in values:
        if isinstance(value, Tensor):
            lengths = zip(value.shape, value.stride(), strict=True)
            yield prod(length for length, step in lengths if step) * value.element_size()
        elif isinstance(value, list | tuple):
            yield from sizes_of(value)


def count_compiled() -> None:
    """Count each function given to ``torch.compile`` from now on as one kernel.

    It runs as written: compilation is off by default, because it would take most of a rehearsal.
    """
    compile_function = torch.compile

    def compile_counted(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compile_counted, **options)
        compiled = compile_function(function, **options)
        if not isfunction(function):
            return compiled

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if CountWork.active is None:
                return compiled(*args, **kwargs)
            with CountWork.active.one_kernel([args, list(kwargs.values())]) as made:
                result = compiled(*args, **kwargs)
                made.append(result)
            return result

        return call

    torch.compile = compile_counted  # type: ignore[assignment]


def launch(
    read: Iterable[Tensor] = (), written: Iterable[Tensor] = (), attention: float = 0
) -> None:
    """Launch one kernel in the place of another one, and count the work of that one.

    Args:
        read, written: what the other one reads and writes.
        attention: its FLOPs, if it is one of (linear) attention's.
    """
    assert CountWork.active is not None
    with CountWork.active.one_kernel(read) as made:
        torch.empty(1, device="cuda").zero_()
        made.extend(written)
    CountWork.active.counts["attention"] += int(attention)


def flops_of(work: Mapping[str, float]) -> float:
    """Return the FLOPs of all :data:`KINDS` in counted work."""
    return sum(work.get(kind, 0) for kind in KINDS)


def _dense_attention_work(name: str, args: Any) -> dict[str, int]:
    """Return the work of ``scaled_dot_product_attention``."""
    # PyTorch's own counter refuses grouped heads before version 2.12.
    backward = "backward" in name
    (b, heads, queries, width), (*_, keys, _), (*_, of_values) = (
        tensor.shape for tensor in args[int(backward) :][:3]
    )
    one_key = 2 * b * heads * queries * (width + of_values)
    return _attention_work(one_key * keys, one_key, backward=backward)


def _attention_work(flops: float, one_key: float, *, backward: bool) -> dict[str, int]:
    """Return the counts of a forward pass with these FLOPs, or of its backward pass."""
    times = BACKWARD_OVER_FORWARD if backward else 1
    return {"attention": int(flops * times), ONE_KEY: int(one_key * times)}


def _varlen_attention_work(name: str, args: Any) -> dict[str, int]:
    """Return the work of ``torch.nn.attention.varlen``."""
    backward = name.endswith("backward")
    query = args[1] if backward else args[0]  # (t, heads, D)
    bounds = [a for a in args if isinstance(a, Tensor) and a.dtype == torch.int32][:2]
    window = next((a for a in args if isinstance(a, list | tuple) and len(a) == 2), (-1, -1))
    flops = segmented_flops(query, bounds[0], bounds[-1], causal=window[1] == 0)
    return _attention_work(*flops, backward=backward)


def segmented_flops(
    query: Tensor, of_queries: Tensor, of_keys: Tensor, *, causal: bool
) -> tuple[float, float]:
    """Return the FLOPs of attention's two matmuls, and what they would be with one key a query.

    They are over the query-key pairs of each segment. The queries are the last positions of their
    segment. With causal attention a query is paired with all keys before the queries, and with half
    of the queries on average.

    Args:
        query: (..., heads, D).
        of_queries, of_keys: bounds of the segments, on the device.
        causal: whether attention is causal.
    """
    queries, keys = (host_view(bounds).diff().double() for bounds in (of_queries, of_keys))
    pairs = float((queries * keys).sum())
    if causal:
        # On average, half of the queries come after a query.
        pairs -= float((queries * queries).sum()) / 2
    a_pair = 4 * query.shape[-2] * query.shape[-1]
    return a_pair * pairs, a_pair * float(queries.sum())


@contextmanager
def count_transformer_engine(counts: Counter[str]) -> Iterator[None]:
    """Add the work of Transformer Engine's kernels to `counts`, if it is imported."""
    extension = sys.modules.get(_TE_EXTENSION)
    works: dict[str, Callable[..., dict[str, int]]] = {
        "generic_gemm": lambda *a: {"gemm": int(_te_product_flops(*a))},
        "te_general_grouped_gemm": lambda *a: {"gemm": int(_te_products_flops(*a))},
        "fused_attn_fwd": lambda *a: _attention_work(*_te_attention_flops(*a), backward=False),
        "fused_attn_bwd": lambda *a: _attention_work(*_te_attention_flops(*a), backward=True),
    }

    def counted(name: str, original: Any) -> Any:
        work = works.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if work is not None:
                counts.update(work(*args))
            result = original(*args, **kwargs)
            if work is None:
                counts[BYTES] += sum(sizes_of([args, list(kwargs.values()), result]))
            return result

        return call

    with ExitStack() as patches:
        for name, value in list(vars(extension).items()) if extension is not None else ():
            if callable(value) and not isinstance(value, type):
                patches.enter_context(mock.patch.object(extension, name, counted(name, value)))
        yield


def _te_product_flops(a: Any, transposed: bool, b: Any, *_: Any) -> float:
    """Return the FLOPs of one matmul."""
    # `a`, with its axes as in PyTorch, is contracted along its last axis if transposed, else along
    # the others.
    last, size = a.size()[-1], a.size().numel()
    contracted = last if transposed else size / max(last, 1)
    return 2 * size * b.size().numel() / max(contracted, 1)


def _te_products_flops(a: list[Any], transposed: bool, b: list[Any], *_: Any) -> float:
    return sum(_te_product_flops(x, transposed, y) for x, y in zip(a, b, strict=True))


def _te_attention_flops(*args: Any) -> tuple[float, float]:
    """Return the FLOPs as :func:`segmented_flops` does."""
    # The bounds of queries and of keys are the first int32 tensors, and the query follows them.
    first = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.int32)
    causal = any("CAUSAL" in str(a) for a in args[:first] if "Mask" in type(a).__name__)
    of_queries, of_keys, query = args[first : first + 3]
    return segmented_flops(query, of_queries, of_keys, causal=causal)
