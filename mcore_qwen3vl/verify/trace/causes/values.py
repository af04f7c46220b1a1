"""Mistakes that the values themselves show: a scaled gradient, a narrow dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import ProbePoint
from mcore_qwen3vl.verify.trace.result import ACTIVATION_GRADIENTS, GRADIENTS, Cause

NEAR = 1e-3
"""The largest relative distance from a parallel size at which a ratio is named after it."""


def find_gradient(divergence: Divergence) -> Iterator[Cause | None]:
    """Test for a missing gradient, or one that is a multiple of the right one."""
    if divergence.part not in (ACTIVATION_GRADIENTS, GRADIENTS):
        return
    actual, right, name = divergence.actual, divergence.expected, divergence.name
    if not bool(actual.any()):
        yield Cause("no gradient", f"No gradient reaches {name}.", "All values are zero.")
        return
    ratio = float((actual * right).sum() / right.square().sum())
    yield divergence.test(
        "gradient scale",
        f"The gradient of {name} is {ratio:.6g} times the right one{_meaning(divergence, ratio)}.",
        ratio * right,
    )


def _meaning(divergence: Divergence, ratio: float) -> str:
    for name, size in asdict(divergence.case.layout).items():
        if type(size) is int and size > 1:
            for value, what in ((size, name.upper()), (1 / size, f"1 / {name.upper()}")):
                if abs(ratio / value - 1) < NEAR:
                    return f", which is {what}"
    return ""


def find_precision(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether every value is exactly representable in a half-precision type."""
    values = divergence.actual.float()
    off = divergence.distance(divergence.expected)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = values.numel() and torch.equal(values, values.to(dtype).float())
        if rounded and off <= 64 * torch.finfo(dtype).eps:
            short = str(dtype).removeprefix("torch.")
            yield Cause(
                "dtype",
                f"{point.name} is computed or kept in {short}.",
                f"All {values.numel()} values are exactly {short} numbers, and {off:.1e} off.",
            )
