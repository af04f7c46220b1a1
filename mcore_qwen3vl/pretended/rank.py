"""One rank of a program on the pretended device: what it does, and what its memory holds."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_qwen3vl.pretended import groups
from mcore_qwen3vl.pretended.device import (
    COUNTERS,
    NOT_THE_CALLER,
    Device,
    HostSync,
    Interval,
    Report,
    Traffic,
    short_path,
)
from mcore_qwen3vl.pretended.flops import BYTES, FUSED, KINDS, ONE_KEY, CountWork
from mcore_qwen3vl.pretended.integers import TrueIntegers, answer_sizes
from mcore_qwen3vl.pretended.preload import Routing, Unavailable, is_preloaded

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
        self._host_syncs: Counter[HostSync] = Counter()
        self._traffic: dict[tuple[str, str], Traffic] = {}

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
            host_syncs=self._new_host_syncs(),
            traffic=self._new_traffic(),
            flops={kind: n for kind, n in self.work.counts.items() if kind in KINDS},
            one_key=self.work.counts[ONE_KEY],
            moved=self.work.counts[BYTES],
            fused=self.work.counts[FUSED],
            launches=self.device.new_launches(),
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
            save, and ``host_syncs``; and the bytes of each :class:`.Traffic`, by group and
            operation with a line break between them.
        """
        now = self.device.counters()
        host = {name: now[name] - self._before[name] for name in ("launches", "host_syncs")}
        host["launches"] -= self.work.counts[FUSED]
        sent = {f"{t.group}\n{t.operation}": t.size for t in groups.traffic()}
        return Counter({**self.work.counts, **host, **sent})

    def _new_host_syncs(self) -> list[HostSync]:
        now = Counter({replace(sync, count=0): sync.count for sync in self.device.host_syncs()})
        new, self._host_syncs = now - self._host_syncs, now
        return [replace(sync, count=count) for sync, count in new.most_common()]

    def _new_traffic(self) -> list[Traffic]:
        now = {(t.group, t.operation): t for t in groups.traffic()}
        before, self._traffic = self._traffic, now
        new = []
        for key, t in now.items():
            old = before.get(key, Traffic(*key, 0, 0))
            new.append(replace(t, calls=t.calls - old.calls, size=t.size - old.size))
        return sorted((t for t in new if t.calls), key=lambda t: -t.size)


@contextmanager
def one_rank(rank: int = 0, world_size: int = 1, routing: Routing = "uniform") -> Iterator[Rank]:
    """Act as one rank of `world_size`, without initialising ``torch.distributed``.

    Inside, device integers have true values and process groups are :class:`.groups.OneRankGroup`.

    Raises:
        Unavailable: this process does not run on the pretended device.
    """
    global current
    if not is_preloaded():
        raise Unavailable(
            "This process does not run on the simulated GPU: start it with python -m "
            "mcore_qwen3vl.pretended, or call pretended.start_again() first."
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    groups.install()
    answer_sizes()
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
                lasting[event["addr"]] = i
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
                live[event["addr"]] = name, size = self._classes[i], int(event["size"])
                yield i, name, size
            elif event["action"] == "free_completed" and event["addr"] in live:
                name, size = live.pop(event["addr"])
                yield i, name, -size
            else:
                yield i, "", 0


def line_of(frames: Frames) -> str:
    """Return the innermost line outside PyTorch, or ``autograd`` if there is none."""
    for frame in frames:
        if not any(part in frame["filename"] for part in NOT_THE_CALLER):
            return f"{short_path(frame['filename'])}:{frame['line']} {frame['name']}"
    return "autograd"
