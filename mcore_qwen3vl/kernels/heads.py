"""Queries, keys and values of a projection, normed, rotated and copied apart in one pass.

A projection gives each token one row with all of its heads. Attention wants queries, keys and
values as tensors of their own, and queries and keys normed and rotated before. In eager code, which
stays the reference (``RotarySelfAttention``), these are eleven kernels of a decoder layer, and as
many backwards. Liger's and Transformer Engine's rotary kernels neither norm nor copy, and want
heads that are apart already.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's


@dataclass(frozen=True)
class HeadColumns:
    """Where a projection's columns have each head of D values: Megatron's, group by group.

    Of each group these are its queries, their gates if any, its key and its value.

    Attributes:
        heads: number of query heads.
        groups: number of key and of value heads.
        width: D.
        gated: whether queries have gates.
    """

    heads: int
    groups: int
    width: int
    gated: bool


@dataclass(frozen=True)
class HeadNorms:
    """The root mean square norms of queries and keys.

    Attributes:
        query, key: (D,) weights.
        eps: is added to the mean square.
        zero_centered: whether the weights are differences from one.
    """

    query: Tensor
    key: Tensor
    eps: float
    zero_centered: bool


def split_heads(
    projection: Tensor, columns: HeadColumns, cos: Tensor, sin: Tensor, norms: HeadNorms
) -> list[Tensor]:
    """Split the heads of tokens, and norm and rotate queries and keys.

    All is computed in float32, and rounded once. The backward pass keeps the projection.

    Args:
        projection: (t, C), bf16, fp16 or float32; see :func:`mcore_qwen3vl.kernels.fits`.
        cos, sin: (t, R / 2), of any of these dtypes; the first R values of each head are rotated.

    Returns:
        Queries (t, heads, D), keys and values (t, groups, D), and the queries' gates (t, heads, D)
        if there are any, in the projection's dtype, and contiguous.
    """
    constants = list(map(int, astuple(columns))), norms.eps, float(norms.zero_centered)
    return list(_SplitHeads.apply(projection, norms.query, norms.key, cos, sin, *constants))


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        *constants: Any,
    ) -> tuple[Tensor, ...]:
        inputs = projection, query_weight, key_weight, cos, sin
        ctx.save_for_backward(*inputs)
        ctx.constants = constants
        return tuple(_operators().split_heads(*inputs, *constants))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        projection, query_weight, key_weight, cos, sin = ctx.saved_tensors
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        of_weights = any(ctx.needs_input_grad[1:3])
        of_projection, of_norms = _operators().join_head_gradients(
            projection, gradients, query_weight, key_weight, cos, sin, *ctx.constants, of_weights
        )
        of_query, of_key = None, None
        if of_weights:
            of_query, of_key = of_norms.unbind()
        return of_projection, of_query, of_key, None, None, None, None, None


def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import heads_triton  # importing Triton takes a second

    return heads_triton.OPERATORS
