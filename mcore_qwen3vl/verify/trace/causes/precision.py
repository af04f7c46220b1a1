"""Values that were computed or kept in a narrower type."""

from __future__ import annotations

import torch

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.result import Cause


def find_precision_cause(divergence: Divergence) -> Cause | None:
    """Every value is exactly representable in a half-precision type."""
    if divergence.forward is None or not divergence.actual.numel():
        return None
    found = divergence.actual.float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(found, found.to(dtype).float()):
            short = str(dtype).removeprefix("torch.")
            off = divergence.distance(divergence.expected)
            if off <= 64 * torch.finfo(dtype).eps:
                return Cause(
                    "dtype",
                    f"{divergence.name} is computed or kept in {short}.",
                    f"All {found.numel()} values are exactly {short} numbers, and {off:.1e} off.",
                )
    return None
