"""Starting a program with the device preloaded, since PyTorch finds CUDA when it is loaded.

The two libraries that replace CUDA are compiled on demand and cached by their source's hash.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).parent / "stub"
_LIBRARIES = {  # soname: source files; whoever opens the driver by this name gets our library
    "libcuda.so.1": ("count", "memory", "kernels", "device", "driver", "libraries", "lookup"),
    "libnvidia-ml.so.1": ("nvml",),
}
_OPTIONS = ("-shared", "-fPIC", "-O2", "-w")


class Unavailable(RuntimeError):
    """The device cannot be simulated here. The message says what to do about it."""


def libraries() -> list[Path]:
    """Return the compiled libraries, from the cache if this source was compiled before.

    They are kept in ``$XDG_CACHE_HOME/pretended-device`` (``~/.cache/pretended-device``).

    Raises:
        Unavailable: this is not Linux, there is no C compiler, it fails, or the cache cannot be
            written to.
    """
    if sys.platform != "linux":
        raise Unavailable(
            f"The simulated GPU needs Linux with glibc, and this is {sys.platform}: run it in a "
            "Linux container."
        )
    return [_library(cache_folder() / name, parts) for name, parts in _LIBRARIES.items()]


def cache_folder() -> Path:
    """Return the cache folder of this source's libraries; it need not exist."""
    content = hashlib.sha256(" ".join(_OPTIONS).encode())
    for file in sorted(SOURCES.glob("*.[ch]")):
        content.update(file.name.encode() + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pretended-device" / content.hexdigest()[:16]


def _library(target: Path, parts: tuple[str, ...]) -> Path:
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
            Unavailable: see :func:`libraries`.
        """
        driver, *others = libraries()
        words = [*map(str, (driver, *others)), *inherited.get("LD_PRELOAD", "").split(":")]
        return {
            "LD_PRELOAD": ":".join(dict.fromkeys(filter(None, words))),
            "PRETENDED_GIB": str(self.memory_gib),
            "PRETENDED_CONTEXT_MIB": str(self.context_mib),
            "PRETENDED_CAPABILITY": str(self.capability),
            "PRETENDED_LATE": str(int(self.late_events)),
            # Compiled code would need Triton and ptxas, and would do nothing.
            "TORCHDYNAMO_DISABLE": inherited.get("TORCHDYNAMO_DISABLE", "1"),
            "TORCH_DISABLE_NATIVE_JIT": inherited.get("TORCH_DISABLE_NATIVE_JIT", "1"),
            "CUDA_VISIBLE_DEVICES": "0",
            # Transformer Engine's permutations are Triton kernels, whose launcher links the driver.
            "TRITON_LIBCUDA_PATH": str(driver.parent),
            # Asking whether there is a device must not make a context, see Workbench.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }


def is_preloaded() -> bool:
    """Return whether this process runs on the pretended device."""
    return "pretended-device" in os.environ.get("LD_PRELOAD", "") and hasattr(
        ctypes.CDLL(None), "pretended_counters"
    )


def start_again(settings: Settings | None = None) -> None:
    """Restart this process on the pretended device, unless it runs on it already.

    Call it first in a program, before anything has side effects.

    Raises:
        Unavailable: see :func:`libraries`.
    """
    if not is_preloaded():
        os.environ |= (settings or Settings()).environment()
        os.execv(sys.executable, sys.orig_argv)
