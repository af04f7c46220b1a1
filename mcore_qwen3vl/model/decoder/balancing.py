"""Megatron's balancing loss of experts, whose count of a rank's own tokens is not its own."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def keep_local_counts() -> None:
    """Let the count of a rank's tokens an expert stay what it is while the ranks' are added up.

    Megatron's sum over the TP x CP group is in place. Where there is a padding mask, it takes the
    number of its own tokens from the same tensor afterwards, and the gradient of the balancing
    loss is as many times too large as the group has ranks (NVIDIA/Megatron-LM#7452, finding 10).
    """
    reduce = moe_utils.reduce_from_tensor_model_parallel_region
    if hasattr(reduce, "keeps"):
        return

    def reduce_copy(counts: Tensor, *arguments: Any, **named: Any) -> Any:
        return reduce(counts.clone(), *arguments, **named)

    reduce_copy.keeps = True  # type: ignore[attr-defined]
    moe_utils.reduce_from_tensor_model_parallel_region = reduce_copy
