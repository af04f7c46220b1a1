"""What a rehearsal on the pretended device found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wait:
    """The host waited for the device at one place."""

    phase: str
    kind: str
    place: str
    """File, line and function outside PyTorch, then its callers."""
    count: int


@dataclass(frozen=True)
class Launch:
    """Kernels of one name, started at one place."""

    phase: str
    kernel: str
    """Words of its mangled name; ``product`` for those of NVIDIA's libraries."""
    place: str
    """The line that launched it, written like a wait's; ``autograd`` for the engine's own."""
    count: int


@dataclass(frozen=True)
class Traffic:
    """What one process group was handed by this rank for one operation."""

    group: str
    """Its description and, in brackets, its size."""
    operation: str
    calls: int
    size: int
    """Bytes of the tensors."""
    span: int = 1
    """Ranks from the first of the group to its last one, both counted."""


@dataclass(frozen=True)
class Stage:
    """A part of the program, for example an iteration. Counts are of this part alone."""

    name: str
    seconds: float
    allocated: int
    """Bytes that PyTorch's allocator has given out at the end of it."""
    peak: int
    """The most so far, in bytes."""
    reserved: int
    """The most that the allocator has taken from the device so far, in bytes."""
    counters: dict[str, int]
    """By the names of :data:`.device.COUNTERS`."""
    waits: list[Wait]
    traffic: list[Traffic]
    flops: dict[str, int]
    """By the names of :data:`.flops.KINDS`."""
    moved: int = 0
    """Bytes that all other kernels read and write."""
    fused: int = 0
    """Launches among the counters that ``torch.compile`` saves on a GPU."""
    launches: list[Launch] = field(default_factory=list)
    """Empty unless :meth:`.device.Device.watch_launches` was called."""


@dataclass
class Report:
    """All stages, and what else the program reported."""

    stages: list[Stage] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> Stage:
        """The stage of this name; KeyError if it was not reached."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; there are {[s.name for s in self.stages]}")

    def to_json(self) -> dict[str, Any]:
        """The report as plain dictionaries and lists."""
        return asdict(self)
