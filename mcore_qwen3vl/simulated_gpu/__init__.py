"""A simulated GPU, on which CUDA code runs and is measured without a GPU.

Underneath PyTorch, a small library of ours, compiled on first use, replaces CUDA. Tensors are real
``cuda`` tensors in PyTorch's own caching allocator, control flow is real, and kernels do nothing.
One process is one rank of any number; the other ranks are assumed to do what it does. It shows

* whether a program runs: device placement, forking, shapes, arguments of kernels' entry points;
* the peak memory of models far larger than the host, and what that memory holds;
* each host sync, with its Python line;
* launches, and the bytes that each operation hands to each process group.

It cannot show results, speed, anything that depends on time, hangs between ranks, or errors inside
kernels. Floats hold whatever is in memory, mostly zeros; integers and booleans have true values.

``stub/`` is that library. Among its files, ``memory.c`` allocates, ``kernels.c`` takes launches,
``driver.c`` stands in for the driver and finds functions by name, ``libraries.c`` for cuBLAS and
others, and ``count.c`` counts. ``device.py`` compiles it, starts a process with it and reads the
counters, ``integers.py`` computes integers, ``groups.py`` stands in for other ranks, and
``rank.py`` counts work and measures memory.

``python -m`` with this package's name runs a program on it, see ``--help``.
:class:`Workbench` runs functions, each in a process of its own that has done its imports. The
device needs Linux with glibc and a C compiler.

This package knows no model and imports nothing but PyTorch, so it can be installed alone, under
any name.
"""

from .device import (
    HostSync,
    Interval,
    Report,
    Settings,
    Unavailable,
    is_preloaded,
    start_again,
)
from .workbench import Failed, Workbench

__all__ = [
    "Failed",
    "HostSync",
    "Interval",
    "Report",
    "Settings",
    "Unavailable",
    "Workbench",
    "is_preloaded",
    "start_again",
]
