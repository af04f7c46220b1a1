"""The kinds of linears in a model, by how tensor parallelism divides them.

Adapters always exchange the rank-r activation, never one as wide as the model. For a
column-parallel weight, B's rows are divided like the weight's, and every rank has all of A. For a
row-parallel weight, A's columns are divided, and every rank has all of B. With x the input that the
rank holds:

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

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.model.lora.adapter_module import Pair

Region = Callable[[Tensor], Tensor]
"""What ranks exchange at one place of an adapter."""

_LAYER = r"decoder\.layers\.\d+\."
_COLUMN = rf"{_LAYER}(self_attention\.linear_qkv|mlp\.linear_fc1)\.weight|output_layer\.weight"
_ROW = rf"{_LAYER}(self_attention\.linear_proj|mlp\.linear_fc2)\.weight"
_EXPERT = rf"{_LAYER}mlp\.experts\.(local_experts\.\d+\.)?linear_fc([12])\.weight\d*"
_ROUTER = rf"{_LAYER}mlp\.router\.weight"
_VISION = (
    r"visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r"|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])\.weight"
)


def local(activation: Tensor) -> Tensor:
    """Do nothing: no tensor parallelism, or inputs and weights are whole on every rank."""
    return activation


def column(group: Any, linear: Any) -> Region:
    """Return the region after A for a column-parallel weight: (s_local, B, r) -> (s, B, r).

    ``linear.sequence_parallel`` is read at each call, because generation turns it off and on.
    """
    divided = tensor_parallel.gather_from_sequence_parallel_region
    whole = tensor_parallel.copy_to_tensor_model_parallel_region
    return lambda x: (divided if linear.sequence_parallel else whole)(x, group=group)


def row(group: Any, linear: Any) -> Region:
    """Return the region after A for a row-parallel weight: (s, B, r) -> (s_local, B, r)."""
    divided = tensor_parallel.reduce_scatter_to_sequence_parallel_region
    whole = tensor_parallel.reduce_from_tensor_model_parallel_region
    return lambda x: (divided if linear.sequence_parallel else whole)(x, group=group)


def summed_over(group: Any) -> Region:
    """Return a region that keeps a whole factor, and sums its gradient over `group`."""
    if group.size() == 1:
        return local
    return lambda factor: tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=group)


@dataclass(frozen=True)
class Kind:
    """The properties of a linear that its adapters depend on."""

    cut: Literal[0, 1] | None  # axis of the weight that is divided; None: every rank holds all
    group: Any  # of the ranks that hold its parts: the TP group, or the ETP group for experts
    sequence_parallel: bool = False  # in training, ranks have other tokens at the input or output
    expert: bool = False
    grouped: bool = False  # one module holds all experts of the rank
    router: bool = False  # no module computes its product
    # Rows that no rank divides; 0: ranks have equal numbers of rows of each Hugging Face tensor.
    # They have not if TP divides the query heads of one KV head.
    head_rows: int = 0

    def region(self, linear: Any) -> Region:
        """Return the region between A and B for `linear`."""
        if self.expert or self.cut is None:
            return local
        return (column if self.cut == 0 else row)(self.group, linear)

    @property
    def whole(self) -> Region:
        """The region for the factor that is not divided."""
        return summed_over(self.group) if self.expert else local

    @property
    def distinct(self) -> bool:
        """Whether the ranks of the group see different values of the input."""
        return self.cut == 1 or (self.cut == 0 and self.sequence_parallel)

    def mark(self, pair: Pair, weight: Tensor) -> None:
        """Mark both factors, so that Megatron reduces and counts their gradients correctly."""
        # Like the weight's: the data-parallel group, and for undivided weights the sum over TP.
        names = ["allreduce"]
        if self.cut is None:
            names += ["sequence_parallel", "average_gradients_across_tp_domain"]
        for factor, name in product((pair.lora_A, pair.lora_B), names):
            if hasattr(weight, name):
                setattr(factor, name, getattr(weight, name))
        if self.cut is None:
            return
        cut, whole = (pair.lora_B, pair.lora_A) if self.cut == 0 else (pair.lora_A, pair.lora_B)
        set_tensor_model_parallel_attributes(cut, True, self.cut, 1)
        if not self.expert:
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]


def kind_of(chunk: Any, parameter: str) -> Kind | None:
    """Return the kind of a weight, by its local name; None: it cannot have an adapter."""
    groups, config = chunk.pg_collection, chunk.config
    rows_are_cut = re.fullmatch(_COLUMN, parameter)
    if rows_are_cut or re.fullmatch(_ROW, parameter):
        if groups.tp.size() == 1:
            return Kind(None, groups.tp)
        uneven = "linear_qkv" in parameter and config.num_query_groups % groups.tp.size()
        return Kind(
            0 if rows_are_cut else 1,
            groups.tp,
            config.sequence_parallel,
            head_rows=config.kv_channels if uneven else 0,
        )
    if expert := re.fullmatch(_EXPERT, parameter):
        axis: Literal[0, 1] = 0 if expert[2] == "1" else 1
        etp = groups.expt_tp
        return Kind(axis if etp.size() > 1 else None, etp, expert=True, grouped=not expert[1])
    if re.fullmatch(_ROUTER, parameter):
        return Kind(None, groups.tp, router=True)
    return Kind(None, groups.tp) if re.fullmatch(_VISION, parameter) else None


@cache
def weight_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return the shapes of the Hugging Face tensors, with experts laid out as in transformers 5."""
    return hf_shapes(table(architecture, expert_layout="v5"))
