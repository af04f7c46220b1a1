"""One rank of a program on the pretended device, and the record of what it does."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from mcore_qwen3vl.pretended import groups
from mcore_qwen3vl.pretended.device import COUNTERS, Device
from mcore_qwen3vl.pretended.flops import BYTES, FUSED, KINDS, ONE_KEY, CountWork
from mcore_qwen3vl.pretended.integers import TrueIntegers, answer_sizes
from mcore_qwen3vl.pretended.preload import Routing, Unavailable, preloaded
from mcore_qwen3vl.pretended.report import HostSync, Interval, Report, Traffic

_LEVELS = {"used", "peak_used", "pinned", "peak_pinned"}  # counters of a level, not of events

current: Rank | None = None
"""The rank that this process is; None outside :func:`one_rank`."""


class Rank:
    """This process's rank, which records the intervals of its program."""

    def __init__(self) -> None:
        self.device = Device()
        self.report = Report()
        self.work = CountWork(self.device.launched)
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
    if not preloaded():
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
