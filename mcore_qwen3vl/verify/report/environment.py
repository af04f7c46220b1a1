"""The software and machine that a report's numbers depend on, besides the models."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from mcore_qwen3vl import __version__

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


def environment() -> dict[str, str]:
    """Return the versions of the packages that compute, and the machine."""
    found = {"mcore-qwen3vl": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return found
