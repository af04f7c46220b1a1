"""What the device's memory held at its peak, and over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_qwen3vl.pretended.device import NOT_THE_CALLER, short_path

Frames = list[dict[str, Any]]
"""Stack frames of Python and the autograd engine, innermost first: filename, line, name."""


def record() -> None:
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
    """The history of PyTorch's allocator since :func:`record`; it is freed with this object."""

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

    def refused(self) -> Moment | None:
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


def line(frames: Frames) -> str:
    """Return the innermost line outside PyTorch, or ``autograd`` if there is none."""
    for frame in frames:
        if not any(part in frame["filename"] for part in NOT_THE_CALLER):
            return f"{short_path(frame['filename'])}:{frame['line']} {frame['name']}"
    return "autograd"
