"""The device's counters, the lines of host syncs and launches, and the record of a program."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
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


# In the order of the stub's enumerations (stub.h).
COUNTERS = (
    *("launches", "gemms", "convolutions", "memsets", "h2d", "d2h", "d2d"),
    *("h2d_bytes", "d2h_bytes", "d2d_bytes", "mallocs", "frees", "used", "peak_used"),
    *("pinned", "peak_pinned", "host_syncs", "unknown_calls"),
)
_STARTED = [COUNTERS.index(name) for name in ("launches", "memsets", "d2d")]
HOST_SYNCS = (
    *("device synchronize", "stream synchronize", "event synchronize", "blocking copy"),
    *("copy to pageable", "copy from pageable", "cudaFree"),
)
_PLACES = 3  # Python frames kept for a host sync or a launch
_WORDS = 5  # words kept of a kernel's name
_LENGTH = re.compile(r"\d+")  # the length of the identifier that follows it in a mangled name
NOT_THE_CALLER = ("/torch/", f"{Path(__file__).parent}/", "<")


class Device:
    """The simulated device of this process; only the newest object records syncs and launches."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.pretended_counters.restype = ctypes.POINTER(ctypes.c_ulonglong)
        self._counts = self._library.pretended_counters()
        self._host_syncs: Counter[tuple[str, str, str]] = Counter()
        self._launches: Counter[tuple[str, str, str]] = Counter()
        self._phase = "other"
        # The object must stay alive, because the library goes on calling it.
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulonglong)(self._record_sync)
        self._library.pretended_on_host_sync(self._callback)

    def set_memory(self, gib: float, context_gib: float | None = None) -> None:
        """Change the device's memory and, before its first use, the context's share, in GiB."""
        self._library.pretended_set_memory(ctypes.c_double(gib))
        if context_gib is not None:
            taken = int(context_gib * (1 << 30))
            for name in ("used", "peak_used"):
                self._counts[COUNTERS.index(name)] = taken

    def counters(self) -> dict[str, int]:
        """Return the counts since the process began, by :data:`COUNTERS`; sizes in bytes."""
        return {name: int(self._counts[i]) for i, name in enumerate(COUNTERS)}

    def count_launches(self) -> int:
        """Return the number of kernels, copies on the device and memsets so far."""
        return sum(int(self._counts[i]) for i in _STARTED)

    def host_syncs(self) -> list[HostSync]:
        """Return the host syncs so far, by phase, kind and place."""
        return [HostSync(*key, count) for key, count in self._host_syncs.items()]

    def watch_launches(self, on: bool = True) -> None:
        """Count kernels by name and place from now on; the program gets a few times slower."""
        # The object must stay alive, because the library goes on calling it.
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._on_launch = kind(self._record_launch) if on else kind()
        self._library.pretended_on_launch(self._on_launch)

    def new_launches(self) -> list[Launch]:
        """Return the launches since the last call of this method, most frequent first."""
        launches, self._launches = self._launches, Counter()
        return [Launch(*key, count) for key, count in launches.most_common()]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record host syncs and launches inside under `name`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def _record_sync(self, kind: int, size: int) -> None:
        self._host_syncs[self._phase, HOST_SYNCS[kind], _place(sys._getframe(1))] += 1

    def _record_launch(self, name: bytes | None) -> None:
        kernel = _kernel_words((name or b"").decode()) or "product"
        self._launches[self._phase, kernel, _place(sys._getframe(1))] += 1


def _place(frame: FrameType | None) -> str:
    """Return the innermost frames outside PyTorch as text, innermost first."""
    places: list[str] = []
    while frame and len(places) < _PLACES:
        file = frame.f_code.co_filename
        if not any(part in file for part in NOT_THE_CALLER):
            places.append(f"{short_path(file)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "autograd"


@cache
def _kernel_words(mangled: str) -> str:
    """Return the words of a mangled C++ name that tell kernels apart."""
    words: list[str] = []
    at = 0
    while length := _LENGTH.search(mangled, at):
        start = length.end()
        at = start + int(length[0])
        word = mangled[start:at]
        told = word in {*words, "at", "native"}
        if len(word) == int(length[0]) and word.isidentifier() and not told:
            words.append(word)
    return " ".join(words[:_WORDS])


@cache
def short_path(file: str) -> str:
    """Return a file's path from its outermost package on; in no package, its last three parts."""
    if "site-packages/" in file:
        return file.rpartition("site-packages/")[2]
    *folders, last = file.split("/")
    top = len(folders)
    while top and Path("/".join(folders[:top]), "__init__.py").exists():
        top -= 1
    if top == len(folders):
        return "/".join([*folders[-2:], last])
    # Around it may be packages without an __init__.py, as ``megatron``, up to a root of imports.
    root = "/".join(folders[:top]) + "/"
    roots = [f"{entry}/" for entry in sys.path if entry and root.startswith(f"{entry}/")]
    return file[len(max(roots, key=len, default=root)) :]
