"""Packages of GPU kernels that Hugging Face would call, hidden where its code runs on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gpu_kernels() -> Iterator[None]:
    """Hide the packages with GPU kernels that Hugging Face's delta nets would call.

    Hugging Face chooses once, when a model's module is imported. So whatever imports the module
    first, does it within this.
    """
    packages = ("causal_conv1d", "fla")
    imported = {name: sys.modules.get(name) for name in packages}
    # Of a module that is None, an import fails as if the package were not installed.
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in imported.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
