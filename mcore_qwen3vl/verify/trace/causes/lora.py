"""An adapted module whose weights and factors are right and whose outcome is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.recording import replay
from mcore_qwen3vl.verify.trace.result import Cause


def find_lora_cause(divergence: Divergence) -> Cause | None:
    """The adapter is left out, or multiplied by another number than alpha / r."""
    point = divergence.forward
    if point is None or point.side == "input" or divergence.adapter is None:
        return None
    of_module = [n for n in divergence.adapter.factors if n.startswith(f"{point.module}.")]
    if not of_module:
        return None
    with _without_adapters(divergence.model.get_submodule(point.module)):
        base = replay(divergence.model, divergence.recording, point)
    if divergence.explains(base):
        return Cause(
            "adapter not applied",
            f"{divergence.name} computes what the base model does: its adapter is left out.",
            divergence.evidence("The module without its adapter", base),
        )
    ratio = _ratio(divergence, base)
    scaled = base + ratio * (divergence.recording.values[point.name] - base)
    if len(of_module) > 1 or not divergence.explains(scaled):
        return None
    right = divergence.adapter.factors[of_module[0]].scaling
    return Cause(
        "adapter scaling",
        f"The adapter of {divergence.name} is multiplied by {ratio * right:.6g} instead of "
        f"{right:.6g}.",
        divergence.evidence("The module with its adapter multiplied so", scaled),
    )


def _ratio(divergence: Divergence, base: Tensor) -> float:
    """How much of the adapter's part mcore has, by least squares."""
    apart = base.flatten(0, -2)[divergence.rows]
    right, found = divergence.expected - apart, divergence.actual - apart
    return float((right * found).sum() / right.square().sum())


@contextmanager
def _without_adapters(module: nn.Module) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
