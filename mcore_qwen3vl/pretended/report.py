"""The record of a rehearsal on the pretended device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class HostSync:
    """Host syncs of one kind at one place."""

    phase: str
    kind: str
    place: str
    """File, line and function outside PyTorch, then its callers."""
    count: int


@dataclass(frozen=True)
class Launch:
    """Launches of one kernel at one place."""

    phase: str
    kernel: str
    """Words of the kernel's mangled name; ``product`` for kernels of NVIDIA's libraries."""
    place: str
    """Like the place of a :class:`HostSync`; ``autograd`` for launches by the autograd engine."""
    count: int


@dataclass(frozen=True)
class Traffic:
    """What this rank handed to one process group for one operation."""

    group: str
    """The group's description and, in brackets, its size."""
    operation: str
    calls: int
    size: int
    """Bytes of the tensors."""
    span: int = 1
    """Ranks from the group's first member to its last, both included."""


@dataclass(frozen=True)
class Interval:
    """A part of the program, for example an iteration. Counts cover this part alone."""

    name: str
    seconds: float
    allocated: int
    """Bytes allocated by PyTorch's allocator at the end of the interval."""
    peak: int
    """The most allocated so far, in bytes."""
    reserved: int
    """The most that the allocator has reserved on the device so far, in bytes."""
    counters: dict[str, int]
    """Counts by the names in :data:`.device.COUNTERS`."""
    host_syncs: list[HostSync]
    traffic: list[Traffic]
    flops: dict[str, int]
    """FLOPs by the names in :data:`.flops.KINDS`."""
    one_key: int = 0
    """FLOPs that attention would take if each query had one key; see :data:`.flops.ONE_KEY`."""
    moved: int = 0
    """Bytes that all other kernels read and write."""
    fused: int = 0
    """Counted launches that ``torch.compile`` would save on a GPU."""
    launches: list[Launch] = field(default_factory=list)
    """Empty unless :meth:`.device.Device.watch_launches` was called."""


@dataclass
class Report:
    """All intervals, and further facts that the program reported."""

    intervals: list[Interval] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def interval(self, name: str) -> Interval:
        """Return the interval of this name; raise KeyError if it was not reached."""
        for interval in self.intervals:
            if interval.name == name:
                return interval
        raise KeyError(f"no interval {name!r}; there are {[s.name for s in self.intervals]}")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain dictionaries and lists."""
        return asdict(self)
