"""A simulated CUDA device: our CUDA branches run, and are measured, without a GPU.

Underneath PyTorch, CUDA is replaced by a small library of ours, compiled on first use. Tensors are
real ``cuda`` tensors in PyTorch's own caching allocator, control flow is real, and kernels do
nothing. One process is one rank of any number; the others do what it does. It tells

* whether a program runs: device placement, forking, shapes, arguments of kernels' entry points;
* the peak memory, and what it holds, of models far larger than the host;
* each wait of the host for the device, with its Python line;
* launches, and the bytes that each process group is handed by each operation.

What it cannot tell: results, speed, what depends on time, hangs between ranks, errors inside
kernels. Floats hold whatever is in memory, mostly zeros; integers and booleans are true.

``python -m mcore_qwen3vl.runtime.pretended --help`` runs a program on it. :class:`Workbench` runs
functions, each in a process of its own that has nothing to import any more. Linux with glibc and a
C compiler only.
"""

from mcore_qwen3vl.runtime.pretended.preload import Settings, preloaded, start_again
from mcore_qwen3vl.runtime.pretended.report import Report, Stage, Wait
from mcore_qwen3vl.runtime.pretended.workbench import As, Failed, Workbench

TESTED_VERSIONS = {"torch": ("2.13.0",), "megatron-core": ("0.19.2",), "CUDA": ("13.0",)}
"""On these, x86-64 and glibc, the tests passed, with the ``torch`` spec."""

__all__ = [
    "TESTED_VERSIONS",
    "As",
    "Failed",
    "Report",
    "Settings",
    "Stage",
    "Wait",
    "Workbench",
    "preloaded",
    "start_again",
]
