"""The work that Transformer Engine launches directly, without PyTorch's operators."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_qwen3vl.pretended.flops import BACKWARD_OVER_FORWARD, BYTES, segmented, size_of

_EXTENSION = "transformer_engine_torch"


@contextmanager
def count_transformer_engine(counts: Counter[str]) -> Iterator[None]:
    """Add the work of Transformer Engine's kernels to `counts`, if it is imported."""
    extension = sys.modules.get(_EXTENSION)
    products: dict[str, tuple[str, Callable[..., float]]] = {
        "generic_gemm": ("gemm", _product),
        "te_general_grouped_gemm": ("gemm", _products),
        "fused_attn_fwd": ("attention", _attention),
        "fused_attn_bwd": ("attention", lambda *a: BACKWARD_OVER_FORWARD * _attention(*a)),
    }

    def counted(name: str, original: Any) -> Any:
        kind, amount = products.get(name, (BYTES, None))

        def call(*args: Any, **kwargs: Any) -> Any:
            if amount is not None:
                counts[kind] += int(amount(*args))
            result = original(*args, **kwargs)
            if amount is None:
                counts[kind] += sum(size_of([args, list(kwargs.values()), result]))
            return result

        return call

    with ExitStack() as patches:
        for name, value in list(vars(extension).items()) if extension is not None else ():
            if callable(value) and not isinstance(value, type):
                patches.enter_context(mock.patch.object(extension, name, counted(name, value)))
        yield


def _product(a: Any, transposed: bool, b: Any, *_: Any) -> float:
    """Return the FLOPs of one matmul.

    `a`, with its axes as in PyTorch, is contracted along its last axis if transposed, else along
    the others.
    """
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
