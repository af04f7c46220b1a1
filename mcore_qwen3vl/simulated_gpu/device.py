"""The device: starting a program with it, its counters, and the record of a program.

PyTorch finds CUDA when it is loaded, so a program is started with the two libraries that replace
CUDA preloaded. They are compiled on demand and cached by their source's hash.

The device counts what it is asked to do, and finds the lines of host syncs and launches.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal

SOURCES = Path(__file__).parent / "stub"
_LIBRARIES = {  # soname: source files; whoever opens the driver by this name gets our library
    "libcuda.so.1": ("count", "memory", "kernels", "device", "driver", "libraries"),
    "libnvidia-ml.so.1": ("nvml",),
}
_OPTIONS = ("-shared", "-fPIC", "-O2", "-w")


class Unavailable(RuntimeError):
    """The device cannot be simulated here. The message says what to do about it."""


def compiled_libraries() -> list[Path]:
    """Return the compiled libraries, from the cache if this source was compiled before.

    They are kept in ``$XDG_CACHE_HOME/simulated-gpu`` (``~/.cache/simulated-gpu``).

    Raises:
        Unavailable: this is not Linux, there is no C compiler, it fails, or the cache cannot be
            written to.
    """
    if sys.platform != "linux":
        raise Unavailable(
            f"The simulated GPU needs Linux with glibc, and this is {sys.platform}: run it in a "
            "Linux container."
        )
    return [_compiled_library(cache_folder() / name, parts) for name, parts in _LIBRARIES.items()]


def cache_folder() -> Path:
    """Return the cache folder of this source's libraries; it need not exist."""
    content = hashlib.sha256(" ".join(_OPTIONS).encode())
    for file in sorted(SOURCES.glob("*.[ch]")):
        content.update(file.name.encode() + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "simulated-gpu" / content.hexdigest()[:16]


def _compiled_library(target: Path, parts: tuple[str, ...]) -> Path:
    """Compile the library `target` if there is none yet, and return `target`."""
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sources = [str(SOURCES / f"{part}.c") for part in parts]
        _compile([*_OPTIONS, *sources, "-o", str(partial), f"-Wl,-soname,{target.name}"])
        partial.rename(target)  # another process may have been first; both are the same
    except OSError as error:
        raise Unavailable(
            f"The simulated GPU cannot be kept in {target.parent} ({error}): set XDG_CACHE_HOME "
            "to a directory that can be written to."
        ) from error
    return target


def _compile(arguments: list[str]) -> None:
    words = (os.environ.get("CC") or "cc").split()
    if shutil.which(words[0]) is None:
        raise Unavailable(
            f"The simulated GPU is compiled on first use, and there is no C compiler {words[0]}:"
            " install gcc or clang (Debian: apt-get install gcc libc6-dev), or set CC."
        )
    done = subprocess.run(
        [*words, *arguments, "-ldl", "-lpthread"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise Unavailable(
            f"{words[0]} cannot compile the simulated GPU; it needs glibc and its headers "
            f"(Debian: libc6-dev). It says: {done.stderr.strip()[-600:]}"
        )


RANK_CONTEXT = "SIMULATED_GPU_RANK"
"""Environment variable of a program on this GPU. It names, as ``module:function``, the context in
which one process of several acts as its rank; the function takes the rank and their number."""

Routing = Literal["uniform", "skewed"]
"""How tokens are spread over experts, see :mod:`.integers`."""


@dataclass(frozen=True)
class Settings:
    """The properties of the device."""

    memory_gib: float = 80.0
    """Device memory in GiB."""
    context_mib: float = 600.0
    """Device memory that the context and loaded kernels take, in MiB."""
    capability: int = 90
    """Compute capability, 10 x major + minor."""
    late_events: bool = False
    """Whether events complete only when the host waits for them. The peak is then an upper bound of
    what tensors in use by several streams take; if events complete at once, it is the least."""

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables with which a program finds this device.

        Raises:
            Unavailable: see :func:`compiled_libraries`.
        """
        driver, *others = compiled_libraries()
        words = [*map(str, (driver, *others)), *inherited.get("LD_PRELOAD", "").split(":")]
        return {
            "LD_PRELOAD": ":".join(dict.fromkeys(filter(None, words))),
            "SIMULATED_GPU_GIB": str(self.memory_gib),
            "SIMULATED_GPU_CONTEXT_MIB": str(self.context_mib),
            "SIMULATED_GPU_CAPABILITY": str(self.capability),
            "SIMULATED_GPU_LATE": str(int(self.late_events)),
            # Compiled code would need Triton and ptxas, and would do nothing.
            "TORCHDYNAMO_DISABLE": inherited.get("TORCHDYNAMO_DISABLE", "1"),
            "TORCH_DISABLE_NATIVE_JIT": inherited.get("TORCH_DISABLE_NATIVE_JIT", "1"),
            RANK_CONTEXT: f"{__package__}.rank:one_rank",
            "CUDA_VISIBLE_DEVICES": "0",
            # Transformer Engine's permutations are Triton kernels, whose launcher links the driver.
            "TRITON_LIBCUDA_PATH": str(driver.parent),
            # Asking whether there is a device must not make a context, see Workbench.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }


def is_preloaded() -> bool:
    """Return whether this process runs on the simulated GPU."""
    return "simulated-gpu" in os.environ.get("LD_PRELOAD", "") and hasattr(
        ctypes.CDLL(None), "simulated_counters"
    )


def start_again(settings: Settings | None = None) -> None:
    """Restart this process on the simulated GPU, unless it runs on it already.

    Call it first in a program, before anything has side effects.

    Raises:
        Unavailable: see :func:`compiled_libraries`.
    """
    if not is_preloaded():
        os.environ |= (settings or Settings()).environment()
        os.execv(sys.executable, sys.orig_argv)


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

    @property
    def key(self) -> str:
        """Group and operation, by which :meth:`.rank.Rank.tally` counts."""
        return f"{self.group}\n{self.operation}"


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
    """FLOPs by the names in :data:`.rank.KINDS`."""
    one_key: int = 0
    """FLOPs that attention would take if each query had one key; see :data:`.rank.ONE_KEY`."""
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
_WORDS = 5  # words kept of a kernel's name
_LENGTH = re.compile(r"\d+")  # the length of the identifier that follows it in a mangled name
_NOT_THE_CALLER = ("/torch/", f"{Path(__file__).parent}/", "<")


class Device:
    """The simulated GPU of this process; only the newest object records syncs and launches."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.simulated_counters.restype = ctypes.POINTER(ctypes.c_ulonglong)
        self._counts = self._library.simulated_counters()
        self._host_syncs: Counter[tuple[str, str, str]] = Counter()
        self._launches: Counter[tuple[str, str, str]] = Counter()
        self._phase = "other"
        # The object must stay alive, because the library goes on calling it.
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulonglong)(self._record_sync)
        self._library.simulated_on_host_sync(self._callback)

    def set_memory(self, gib: float, context_gib: float | None = None) -> None:
        """Change the device's memory and, before its first use, the context's share, in GiB."""
        self._library.simulated_set_memory(ctypes.c_double(gib))
        if context_gib is not None:
            # The counters are the library's own: it refuses what `used` leaves no room for.
            taken = int(context_gib * (1 << 30))
            for name in ("used", "peak_used"):
                self._counts[COUNTERS.index(name)] = taken

    def counters(self) -> dict[str, int]:
        """Return the counts since the process began, by :data:`COUNTERS`; sizes in bytes."""
        return {name: int(self._counts[i]) for i, name in enumerate(COUNTERS)}

    def count_launches(self) -> int:
        """Return the number of kernels, copies on the device and memsets so far."""
        return sum(int(self._counts[i]) for i in _STARTED)

    def take_host_syncs(self) -> list[HostSync]:
        """Return the host syncs since the last call of this method, most frequent first."""
        syncs, self._host_syncs = self._host_syncs, Counter()
        return [HostSync(*key, count) for key, count in syncs.most_common()]

    def watch_launches(self, on: bool = True) -> None:
        """Count kernels by name and place from now on; the program gets a few times slower."""
        # The object must stay alive, because the library goes on calling it.
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._on_launch = kind(self._record_launch) if on else kind()  # the latter is NULL
        self._library.simulated_on_launch(self._on_launch)

    def take_launches(self) -> list[Launch]:
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

    def _record_sync(self, kind: int, size: int) -> None:  # the signature is the library's
        self._host_syncs[self._phase, HOST_SYNCS[kind], _place_on_stack(sys._getframe(1))] += 1

    def _record_launch(self, name: bytes | None) -> None:
        kernel = _kernel_words((name or b"").decode()) or "product"
        # Frame 0 is this callback.
        self._launches[self._phase, kernel, _place_on_stack(sys._getframe(1))] += 1


def place_of(frames: Iterable[tuple[str, int | None, str]], most: int = 3) -> str:
    """Return up to `most` frames outside PyTorch as text; ``autograd`` if there are none.

    `frames` have a file, a line and a function each, the innermost one first.
    """
    places = (
        f"{short_path(file)}:{line} {function}"
        for file, line, function in frames
        if not any(part in file for part in _NOT_THE_CALLER)
    )
    return " < ".join(islice(places, most)) or "autograd"


def _place_on_stack(frame: FrameType) -> str:
    stack = walk_stack(frame)
    return place_of((f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack)


@cache
def _kernel_words(mangled: str) -> str:
    """Return the words of a mangled C++ name that tell kernels apart."""
    words: list[str] = []
    at = 0
    while length := _LENGTH.search(mangled, at):
        start = length.end()
        at = start + int(length[0])
        word = mangled[start:at]
        # Names of namespaces tell nothing, nor does a word for the second time.
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
