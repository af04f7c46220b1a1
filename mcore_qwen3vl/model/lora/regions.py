"""Communication of adapters: always of the rank-r activation, never of one as wide as the model.

Beside a column-parallel weight B's rows are cut as the weight's and every rank has all of A; beside
a row-parallel one A's columns are cut and every rank has all of B. With x the input as the rank
holds it:

======  =====================================  ====================================================
cut     TP                                     TP with SP
======  =====================================  ====================================================
column  x A^T is whole; its gradient is the    x A^T of all tokens is gathered; its gradient is
        sum of the ranks': copied into TP      summed and scattered. A sees this rank's tokens only
row     x A^T is a part: summed over TP        summed and scattered. B sees this rank's tokens only
======  =====================================  ====================================================

A factor that sees this rank's tokens only is marked ``sequence_parallel``, so that Megatron sums
its gradient over TP, as that of its norms.

Under ETP the token dispatcher gathers the experts' inputs and sums their outputs, and the gradients
of both, so nothing is done to activations. But every rank works out the gradient of a whole factor
from its part of the other one: :func:`summed_over` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

Region = Callable[[Tensor], Tensor]


def local(activation: Tensor) -> Tensor:
    """Without tensor parallelism, and where inputs and weights are whole on every rank."""
    return activation


def column(group: Any, linear: Any) -> Region:
    """After A, beside a column-parallel weight: (s_local, B, r) -> (s, B, r).

    Args:
        group: of TP.
        linear: whose ``sequence_parallel`` counts at each call: generation turns it off and on.
    """

    def region(x: Tensor) -> Tensor:
        if linear.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(x, group=group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=group)

    return local if group.size() == 1 else region


def row(group: Any, linear: Any) -> Region:
    """After A, beside a row-parallel weight: (s, B, r) -> (s_local, B, r); see :func:`column`."""

    def region(x: Tensor) -> Tensor:
        if linear.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(x, group=group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(x, group=group)

    return local if group.size() == 1 else region


def summed_over(group: Any) -> Region:
    """Leave a whole factor unchanged, and sum its gradient over the ranks of `group`."""
    if group.size() == 1:
        return local
    return lambda factor: tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=group)
