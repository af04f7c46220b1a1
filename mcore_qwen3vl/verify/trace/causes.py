"""Experiments that find out why a probe point differs.

Everything before the first point out of tolerance agrees, so its inputs are Hugging Face's. An
experiment assumes one mistake, recomputes the point from those inputs, and names the mistake if the
outcome is what mcore computed, within the point's rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain

import torch

from mcore_qwen3vl.verify.trace.divergence import Cause, Divergence
from mcore_qwen3vl.verify.trace.layer_causes import (
    find_attention,
    find_deepstack,
    find_fusion,
    find_lora,
    find_merger,
    find_norm,
    find_rotary,
    find_router,
)
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    ProbePoint,
)
from mcore_qwen3vl.verify.trace.weight_causes import find_weight

Experiment = Callable[[Divergence, ProbePoint], Iterator[Cause | None]]
"""Yields a cause where the outcome agrees with mcore's values, None where it does not."""

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


EXPERIMENTS: tuple[tuple[str, Experiment], ...] = (
    (r".*", find_weight),
    (r".*", find_lora),
    (r".*language_model\.rotary_emb", find_rotary),
    (r".*norm\d?", find_norm),
    (r".*self_attn\.o_proj:input", find_attention),
    (r".*mlp\.gate", find_router),
    (r".*inputs_embeds", find_fusion),
    (r".*language_model\.layers\.\d+", find_deepstack),
    (r".*deepstack_merger_list\.\d+", find_merger),
    (r".*", find_precision),
)
"""The experiments in the order in which they are tried, each after a pattern of probe points."""


def find_cause(divergence: Divergence) -> Cause:
    """Return the first cause that explains what mcore computed; ``unknown`` if none does."""
    point, name = divergence.point, divergence.name
    tried = [find_gradient(divergence)]
    if point is not None and divergence.part == ACTIVATIONS:
        tried = [
            find(divergence, point) for where, find in EXPERIMENTS if re.fullmatch(where, name)
        ]
    unknown = Cause(
        "unknown",
        f"The inputs of {name} and its weights agree with Hugging Face's; what it computes from "
        "them does not.",
        f"{len(tried)} kinds of experiments were made; none reproduces what mcore computed.",
        confirmed=False,
    )
    return next(filter(None, chain.from_iterable(tried)), unknown)
