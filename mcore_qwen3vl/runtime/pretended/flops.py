"""Floating-point operations of the matrix products and attention kernels that a rank launches.

Counted from the operators' shapes, by PyTorch's own formulas where it has them. A multiply and an
add are two; recomputed work counts again, unlike in an MFU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mcore_qwen3vl.runtime.pretended.integers import host_view

KINDS = ("gemm", "attention", "convolution")
BACKWARD_OVER_FORWARD = 2.5  # five products instead of two: the scores are computed again
_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")


class CountFlops(TorchDispatchMode):
    """Adds up, by the names in :data:`KINDS`, what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        if func.namespace == "torch_attn":
            self.counts["attention"] += _varlen(packet.__name__, args)
        elif packet.__name__.startswith("_scaled_dot_product"):
            self.counts["attention"] += _dense(packet.__name__, args)
        elif packet.__name__ == "_grouped_mm":
            self.counts["gemm"] += _grouped(*args[:2])
        elif formula is not None:
            self.counts[_kind(packet.__name__)] += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _kind(name: str) -> str:
    if name in _GEMMS:
        return "gemm"
    return "convolution" if "conv" in name else "attention"


def _grouped(a: Tensor, b: Tensor) -> int:
    """FLOPs of ``F.grouped_mm``: rows (T, K) by (E, K, N), or for weight gradients (M, T) by
    (T, N)."""
    return 2 * a.numel() * b.shape[-1]


def _dense(name: str, args: Any) -> int:
    """FLOPs of ``scaled_dot_product_attention``; PyTorch's counter refuses grouped heads before
    2.12."""
    backward = "backward" in name
    (b, heads, queries, width), (*_, keys, _), (*_, of_values) = (
        tensor.shape for tensor in args[int(backward) :][:3]
    )
    flops = 2 * b * heads * queries * keys * (width + of_values)
    return int(flops * (BACKWARD_OVER_FORWARD if backward else 1))


def _varlen(name: str, args: Any) -> int:
    """FLOPs of ``torch.nn.attention.varlen``."""
    backward = name.endswith("backward")
    query = args[1] if backward else args[0]  # (t, heads, D)
    bounds = [a for a in args if isinstance(a, Tensor) and a.dtype == torch.int32][:2]
    window = next((a for a in args if isinstance(a, list | tuple) and len(a) == 2), (-1, -1))
    flops = segmented(query, bounds[0], bounds[-1], causal=window[1] == 0)
    return int(flops * (BACKWARD_OVER_FORWARD if backward else 1))


def segmented(query: Tensor, of_queries: Tensor, of_keys: Tensor, *, causal: bool) -> float:
    """Two products over the pairs of a query and a key in each segment.

    Causal attention, of which our segments' queries are the last ones, sees what is not above the
    diagonal: half of the square of the queries, and all keys before them.

    Args:
        query: (..., heads, D).
        of_queries, of_keys: bounds of the segments, on the device.
        causal: whether it is.
    """
    queries, keys = (host_view(bounds).diff().double() for bounds in (of_queries, of_keys))
    pairs = float((queries * keys).sum())
    if causal:
        pairs -= float((queries * queries).sum()) / 2
    return 4 * query.shape[-2] * query.shape[-1] * pairs
