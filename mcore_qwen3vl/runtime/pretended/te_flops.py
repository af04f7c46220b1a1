"""FLOPs of what Transformer Engine launches by itself, past PyTorch's operators."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_qwen3vl.runtime.pretended.flops import BACKWARD_OVER_FORWARD, segmented

_EXTENSION = "transformer_engine_torch"


@contextmanager
def count_transformer_engine(counts: Counter[str]) -> Iterator[None]:
    """Inside, its products and attention kernels add to `counts`; without it nothing happens."""
    extension = sys.modules.get(_EXTENSION)

    def adding(name: str, kind: str, flops: Callable[..., float]) -> Any:
        if extension is None:
            return nullcontext()
        original = getattr(extension, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += int(flops(*args))
            return original(*args, **kwargs)

        return mock.patch.object(extension, name, counted)

    with (
        adding("generic_gemm", "gemm", _product),
        adding("te_general_grouped_gemm", "gemm", _products),
        adding("fused_attn_fwd", "attention", _attention),
        adding("fused_attn_bwd", "attention", lambda *a: BACKWARD_OVER_FORWARD * _attention(*a)),
    ):
        yield


def _product(a: Any, transposed: bool, b: Any, *_: Any) -> float:
    """`a`, as PyTorch sees it, is contracted along its last axis if transposed, or its others."""
    last = a.size()[-1]
    size = a.size().numel()
    contracted = last if transposed else size / max(last, 1)
    return 2 * size * b.size().numel() / max(contracted, 1)


def _products(a: list[Any], transposed: bool, b: list[Any], *_: Any) -> float:
    return sum(_product(x, transposed, y) for x, y in zip(a, b, strict=True))


def _attention(*args: Any) -> float:
    first = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.int32)
    causal = any("CAUSAL" in str(a) for a in args[:first] if "Mask" in type(a).__name__)
    of_queries, of_keys, query = args[first : first + 3]
    return segmented(query, of_queries, of_keys, causal=causal)
