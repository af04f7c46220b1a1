"""The two libraries that replace CUDA, compiled on demand and cached by their source's hash."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    return [_library(cached_in() / name, parts) for name, parts in _LIBRARIES.items()]


def cached_in() -> Path:
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
