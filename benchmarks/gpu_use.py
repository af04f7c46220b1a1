"""How a profile's iterations use the GPU: when it is busy, with what, and what happens meanwhile.

A profile is what :mod:`torch.profiler` exports: events of Chrome's trace format, whose times are
microseconds. It has iterations where annotations named ``iteration N`` mark them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD, LOG

KERNELS = Path(__file__).parents[1] / "mcore_qwen3vl" / "kernels"
MARK = re.compile(r"iteration \d+")
"""Names of the annotations that last from the end of one step to the end of the next."""
PHASES: frozenset[str] = frozenset((FORWARD_BACKWARD, FINALIZE, LOG))
REST = "optimizer and the rest"
NOTHING = "no operator"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
OURS, OTHERS = "our Triton kernels", "others"
# The first group with a match has the kernel: FlashAttention 3 has CUTLASS in its names, too.
GROUPS = (
    ("attention", re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)),
    ("exchanges", re.compile(r"nccl", re.IGNORECASE)),
    ("products", re.compile(r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset|copy|CatArray|FillFunctor", re.IGNORECASE)),
)
SHORT, LONG = 20, 1000  # microseconds of a gap
LENGTHS = (f"below {SHORT} us", "between", f"above {LONG / 1000:g} ms")
LONGEST = 5  # gaps that are described


class NoIterations(ValueError):
    """A profile in which no iteration is marked."""


class Span(NamedTuple):
    """A stretch of time, in microseconds."""

    start: float
    end: float
    name: str = ""


@dataclass(frozen=True)
class Segment:
    """A stretch of a thread's time in which the same spans are running, the innermost one last."""

    start: float
    end: float
    path: tuple[str, ...]


def use_of_gpu(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the marked iterations use the GPU.

    The GPU is busy while any of its streams runs a kernel, a copy or a fill. A gap is a stretch in
    which it is not. Work outside of the iterations does not count, and work across their border
    counts for the time within.

    Args:
        events: of a profile, in which the iterations follow each other.

    Returns:
        Means of an iteration: its milliseconds, those in which the GPU is busy, their share,
        launches, milliseconds and launches by group of kernels, idle milliseconds by phase of the
        host and by length of the gap. And the longest gaps: how many milliseconds after the start
        of the first iteration each begins, its own milliseconds, the host's phase, and the host's
        operator that takes most of it, behind its caller.

    Raises:
        NoIterations: no iteration is marked.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    annotations = [event for event in complete if event.get("cat") == "user_annotation"]
    marks = [_span_of(event) for event in annotations if MARK.fullmatch(event["name"])]
    if not marks:
        raise NoIterations("No iteration is marked in the profile.")
    start, end = min(mark.start for mark in marks), max(mark.end for mark in marks)
    phases = list(innermost(_span_of(event) for event in annotations if event["name"] in PHASES))
    on_gpu: list[Span] = []
    threads: defaultdict[Any, list[Span]] = defaultdict(list)
    for event in complete:
        span = _span_of(event)
        if span.end <= start or span.start >= end:
            continue
        if event.get("cat") in ON_GPU:
            on_gpu.append(Span(max(span.start, start), min(span.end, end), span.name))
        elif event.get("cat") in ON_HOST:
            threads[event["tid"]].append(span)
    operators = [segment for spans in threads.values() for segment in innermost(spans)]
    busy = merge(on_gpu)
    gaps = gaps_between(busy, start, end)
    longest = sorted(gaps, key=lambda gap: gap.start - gap.end)[:LONGEST]
    count, busy_time = len(marks), sum(span.end - span.start for span in busy)
    return {
        "iterations": count,
        "ms": (end - start) / count / 1e3,
        "busy ms": busy_time / count / 1e3,
        "busy": busy_time / (end - start),
        "launches": len(on_gpu) / count,
        "groups": _by_group(on_gpu, count),
        "idle ms by phase": _idle_by_phase(gaps, phases, count),
        "idle ms by length": _idle_by_length(gaps, count),
        "longest gaps": [_describe(gap, start, phases, operators) for gap in longest],
    }


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return the stretches that any of the spans covers, in order and apart from each other."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(Span(span.start, span.end))
    return merged


def gaps_between(busy: Sequence[Span], start: float, end: float) -> list[Span]:
    """Return what is left of the time from `start` to `end` between stretches that are apart."""
    ends = [start, *(span.end for span in busy)]
    starts = [*(span.start for span in busy), end]
    return [Span(a, b) for a, b in zip(ends, starts, strict=True) if b > a]


def innermost(spans: Iterable[Span]) -> Iterator[Segment]:
    """Divide the time of one thread's spans, which lie within each other, by what runs innermost.

    Time without any span is left out.
    """
    running: list[tuple[float, tuple[str, ...]]] = []  # where each ends, and its path
    now = -inf
    for start, end, name in [*sorted(spans, key=lambda s: (s.start, -s.end)), Span(inf, inf)]:
        while running and running[-1][0] <= start:
            until, path = running.pop()
            if until > now:
                yield Segment(now, until, path)
                now = until
        if running and start > now:
            yield Segment(now, start, running[-1][1])
        now = max(now, start)
        running.append((end, (*(running[-1][1] if running else ()), name)))


@cache
def our_kernels() -> frozenset[str]:
    """Return the names of this package's Triton kernels, which are those of their functions."""
    return frozenset(
        node.name
        for file in KERNELS.glob("*_triton.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
    )


def group_of(kernel: str) -> str:
    """Return the group of a kernel, a copy or a fill, by its name."""
    if kernel in our_kernels():
        return OURS
    return next((group for group, pattern in GROUPS if pattern.search(kernel)), OTHERS)


def _span_of(event: Mapping[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event.get("dur", 0), event["name"])


def _by_group(on_gpu: Iterable[Span], count: int) -> dict[str, dict[str, float]]:
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for span in on_gpu:
        groups[group_of(span.name)].append(span.end - span.start)
    return {
        group: {"ms": sum(times) / count / 1e3, "launches": len(times) / count}
        for group, times in sorted(groups.items(), key=lambda item: -sum(item[1]))
    }


def _idle_by_phase(gaps: Iterable[Span], phases: Sequence[Segment], count: int) -> dict[str, float]:
    idle: defaultdict[str, float] = defaultdict(float)
    for gap in gaps:
        for path, time in _times_in(gap, phases, (REST,)).items():
            idle[path[-1]] += time / count / 1e3
    return dict(idle)


def _idle_by_length(gaps: Iterable[Span], count: int) -> dict[str, float]:
    idle = dict.fromkeys(LENGTHS, 0.0)
    for gap in gaps:
        time = gap.end - gap.start
        idle[LENGTHS[(time >= SHORT) + (time >= LONG)]] += time / count / 1e3
    return idle


def _describe(
    gap: Span, start: float, phases: Sequence[Segment], operators: Sequence[Segment]
) -> dict[str, Any]:
    in_phases, on_host = _times_in(gap, phases, (REST,)), _times_in(gap, operators, (NOTHING,))
    path = max(on_host, key=on_host.__getitem__)
    return {
        "at ms": (gap.start - start) / 1e3,
        "ms": (gap.end - gap.start) / 1e3,
        "phase": max(in_phases, key=in_phases.__getitem__)[-1],
        "host": " > ".join(path[-2:]),
        "host ms": on_host[path] / 1e3,
    }


def _times_in(
    gap: Span, segments: Iterable[Segment], rest: tuple[str, ...]
) -> dict[tuple[str, ...], float]:
    """Return the microseconds of a gap by path of the segments; `rest` is that of no segment."""
    times: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for segment in segments:
        common = min(segment.end, gap.end) - max(segment.start, gap.start)
        if common > 0:
            times[segment.path] += common
    without = gap.end - gap.start - sum(times.values())
    if without > 0 or not times:
        times[rest] = without
    return times
