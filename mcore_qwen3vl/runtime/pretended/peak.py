"""What the device's memory held when it held most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


def record() -> None:
    """Let PyTorch's allocator keep its whole history, which :func:`peak_by` replays."""
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=4_000_000
    )


def peak_by(classify: Callable[[list[dict[str, Any]]], str]) -> tuple[int, dict[str, int]]:
    """What lived when most memory was allocated: (bytes, {class: bytes}), largest first.

    Replays the history since :func:`record`.

    Args:
        classify: from an allocation's Python frames, innermost first, to a name.
    """
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    used = best = moment = 0
    live: dict[int, dict[str, Any]] = {}
    for i, event in enumerate(trace):
        used += _change(live, event)
        if used > best:
            best, moment = used, i
    live.clear()
    for event in trace[: moment + 1]:
        _change(live, event)
    sizes: Counter[str] = Counter()
    for event in live.values():
        sizes[classify(event.get("frames", []))] += event["size"]
    return best, dict(sizes.most_common())


def _change(live: dict[int, dict[str, Any]], event: dict[str, Any]) -> int:
    """Bytes that one event of the allocator's history adds to `live`."""
    if event["action"] == "alloc":
        live[event["addr"]] = event
        return int(event["size"])
    if event["action"] == "free_completed" and event["addr"] in live:
        return -int(live.pop(event["addr"])["size"])
    return 0
