"""Why a probe point differs, found by experiment.

Everything before the first point out of tolerance agrees, so its inputs are Hugging Face's. Each
experiment assumes one mistake, computes the point again from those inputs, and compares the outcome
with what mcore computed. A cause is named when they agree within the point's rounding.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_qwen3vl.verify.trace.causes.attention import find_attention_cause
from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.causes.fusion import find_deepstack_cause, find_fusion_cause
from mcore_qwen3vl.verify.trace.causes.gradients import find_gradient_cause
from mcore_qwen3vl.verify.trace.causes.lora import find_lora_cause
from mcore_qwen3vl.verify.trace.causes.norms import find_norm_cause
from mcore_qwen3vl.verify.trace.causes.precision import find_precision_cause
from mcore_qwen3vl.verify.trace.causes.rotary import find_rotary_cause
from mcore_qwen3vl.verify.trace.causes.router import find_router_cause
from mcore_qwen3vl.verify.trace.causes.vision import find_vision_cause
from mcore_qwen3vl.verify.trace.causes.weights import find_weight_cause
from mcore_qwen3vl.verify.trace.result import Cause

EXPERIMENTS: tuple[Callable[[Divergence], Cause | None], ...] = (
    find_gradient_cause,
    find_weight_cause,
    find_lora_cause,
    find_rotary_cause,
    find_norm_cause,
    find_attention_cause,
    find_router_cause,
    find_fusion_cause,
    find_deepstack_cause,
    find_vision_cause,
    find_precision_cause,
)
"""In the order in which they are tried; each declines probe points that it knows nothing about."""


def find_cause(divergence: Divergence) -> Cause:
    """The first experiment whose outcome agrees with what mcore computed."""
    for experiment in EXPERIMENTS:
        cause = experiment(divergence)
        if cause is not None:
            return cause
    return Cause(
        "unknown",
        f"The inputs of {divergence.name} and its weights agree with Hugging Face's; what it "
        "computes from them does not.",
        f"{len(EXPERIMENTS)} kinds of experiments were made; none gave what mcore computed.",
        confirmed=False,
    )


__all__ = ["EXPERIMENTS", "Divergence", "find_cause"]
