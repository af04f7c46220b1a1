"""A fix for Megatron's load-balancing loss of experts, whose local token counts are overwritten."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def keep_local_counts() -> None:
    """Keep a rank's own token counts per expert when they are summed over the ranks.

    Megatron sums in place over the TP x CP group. With a padding mask it then takes the number of
    its own tokens from the same tensor, and the gradient of the balancing loss is too large by a
    factor of the group's size (NVIDIA/Megatron-LM#7452, finding 10).
    """
    reduce = moe_utils.reduce_from_tensor_model_parallel_region
    if hasattr(reduce, "keeps"):
        return

    def reduce_copy(counts: Tensor, *arguments: Any, **named: Any) -> Any:
        return reduce(counts.clone(), *arguments, **named)

    reduce_copy.keeps = True  # type: ignore[attr-defined]
    moe_utils.reduce_from_tensor_model_parallel_region = reduce_copy
