"""Communication of adapters: always of the rank-r activation, never of one as wide as the model.

For a column-parallel weight, B's rows are divided like the weight's, and every rank has all of A.
For a row-parallel weight, A's columns are divided, and every rank has all of B. With x the input
that the rank holds:

======  =====================================  ====================================================
weight  TP                                     TP with SP
======  =====================================  ====================================================
column  x A^T is whole; its gradient is        x A^T is gathered for all tokens; its gradient is
        summed over the ranks (copy to TP)     summed and scattered. A sees this rank's tokens only
row     x A^T is a part: summed over TP        summed and scattered. B sees this rank's tokens only
======  =====================================  ====================================================

A factor that sees this rank's tokens only is marked ``sequence_parallel``, so that Megatron sums
its gradient over TP, as it does for norms.

Under ETP the token dispatcher gathers the experts' inputs and sums their outputs, and does the same
for gradients, so activations need nothing here. But every rank computes the gradient of a whole
factor from its part of the other factor: :func:`summed_over` adds these gradients up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

Region = Callable[[Tensor], Tensor]


def local(activation: Tensor) -> Tensor:
    """Do nothing: no tensor parallelism, or inputs and weights are whole on every rank."""
    return activation


def column(group: Any, linear: Any) -> Region:
    """Return the region after A for a column-parallel weight: (s_local, B, r) -> (s, B, r).

    Args:
        group: the TP group.
        linear: the linear, whose ``sequence_parallel`` is read at each call, because generation
            turns it off and on.
    """
    divided = tensor_parallel.gather_from_sequence_parallel_region
    whole = tensor_parallel.copy_to_tensor_model_parallel_region
    return lambda x: (divided if linear.sequence_parallel else whole)(x, group=group)


def row(group: Any, linear: Any) -> Region:
    """Return the region after A for a row-parallel weight: (s, B, r) -> (s_local, B, r).

    The arguments are those of :func:`column`.
    """
    divided = tensor_parallel.reduce_scatter_to_sequence_parallel_region
    whole = tensor_parallel.reduce_from_tensor_model_parallel_region
    return lambda x: (divided if linear.sequence_parallel else whole)(x, group=group)


def summed_over(group: Any) -> Region:
    """Return a region that keeps a whole factor, and sums its gradient over `group`."""
    if group.size() == 1:
        return local
    return lambda factor: tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=group)
