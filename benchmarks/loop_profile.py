"""How the training loop uses the GPU, by a profile of its fourth and fifth iteration.

    python benchmarks/loop_profile.py TRACE.json.gz --hf-model DIR --data-path FILE …

It trains one rank in this process with the flags of ``mcore-qwen3vl train``. It writes the profile,
for a viewer such as https://ui.perfetto.dev, and prints one JSON object: what
:func:`benchmarks.gpu_use.use_of_gpu` finds in the profile, and what is measured beside it. A
profile slows the host but no kernel. So later iterations are timed without it, and the share of
their time in which the GPU is busy is derived from both.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_use import use_of_gpu
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal import stubs
from mcore_qwen3vl.simulated_gpu.device import is_preloaded
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.events import Phase, RunObserver
from mcore_qwen3vl.training.run import main as train

FIRST, LAST = 4, 5  # iterations of the profile
ALLOCATOR = ("num_alloc_retries", "num_device_alloc", "num_device_free")
"""Counts of :func:`torch.cuda.memory_stats`: for each of these the host waits for the GPU."""


class LoopProfiler(RunObserver):
    """Profiles two iterations of a run, and times those that follow.

    An iteration lasts from the end of a step to the end of the next. It begins with the log of the
    step before.

    Attributes:
        seconds: of each iteration after the profile.
        allocator: the counts of :data:`ALLOCATOR` in the iterations of the profile.
    """

    def __init__(self, trace: Path) -> None:
        """`trace` is the file to write; a name that ends in ``.gz`` compresses it."""
        self.seconds: list[float] = []
        self.allocator: dict[str, int] = {}
        self._trace = trace
        self._mark: AbstractContextManager[object] = nullcontext()
        self._ended = 0.0

    def step(self, iteration: int) -> None:
        """End what the iteration has, and begin what the next one has."""
        if iteration > LAST:
            self.seconds.append(time.perf_counter() - self._ended)
        elif iteration == FIRST - 2:  # the profiler's own start is part of the iteration before
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _on_gpu() else [])],
                schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
                on_trace_ready=lambda done: done.export_chrome_trace(str(self._trace)),
            )
            self._profile.start()
        elif iteration in (FIRST - 1, LAST):  # no kernel may cross the ends of the profile
            _wait()
        if FIRST <= iteration <= LAST:
            self._mark.__exit__(None, None, None)
        if iteration in (FIRST - 1, LAST):
            counts = _count_allocations()
            self.allocator = {name: n - self.allocator.get(name, 0) for name, n in counts.items()}
            self._profile.step()
        if FIRST - 1 <= iteration < LAST:
            self._mark = record_function(f"iteration {iteration + 1}")
            self._mark.__enter__()
        self._ended = time.perf_counter()

    def during(self, phase: Phase) -> AbstractContextManager[object]:
        """Name the phase in the profile."""
        return record_function(phase)


def main(argv: Sequence[str]) -> int:
    """Train, write the profile and print what it says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, help="file to write: NAME.json or NAME.json.gz")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of mcore-qwen3vl train")
    options = parser.parse_args(argv)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address} | os.environ
    if is_preloaded():
        stubs.install_linear_attention()
    observer = LoopProfiler(options.trace)
    try:
        if code := train(CommandLine(options.flags), observer):
            return code
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not observer.seconds:
        parser.error(f"the run must have more than {LAST} iterations")
    print(json.dumps(report(options.trace, observer), indent=1))
    return 0


def report(trace: Path, observer: LoopProfiler) -> dict[str, Any]:
    """Return what the profile and the observer of a run that has ended say of an iteration."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        use = use_of_gpu(json.load(file)["traceEvents"])
    elapsed = median(observer.seconds) * 1e3
    return {
        "ms without profile": elapsed,
        "busy without profile": use["busy ms"] / elapsed,
        **use,
        "allocator": observer.allocator,
    }


def _on_gpu() -> bool:
    return torch.cuda.is_initialized()


def _wait() -> None:
    if _on_gpu():
        torch.cuda.synchronize()


def _count_allocations() -> dict[str, int]:
    counts = torch.cuda.memory_stats() if _on_gpu() else {}
    return {name: counts.get(name, 0) for name in ALLOCATOR}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
