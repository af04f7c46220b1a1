"""The adapters of a pipeline chunk: pairs of factors, and the linears where they act.

Pairs of factors are a child module of the chunk, with checkpoints of its own. A :class:`Site` is a
linear with all Hugging Face tensors that it holds. Two linears are special: a grouped one holds all
experts of a rank, and a router computes its logits in a method and not in a module.

The kind of a linear is how tensor parallelism divides it. Adapters always exchange the rank-r
activation, never one as wide as the model. For a column-parallel weight, B's rows are divided like
the weight's, and every rank has all of A. For a row-parallel weight, A's columns are divided, and
every rank has all of B. With x the input that the rank holds:

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
factor from its part of the other factor: :meth:`LinearKind.region_of_undivided_factor` adds these
gradients up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.converters.storage.boxes import Selection, Shape
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product
from mcore_qwen3vl.model.inputs import to_device

label_module(__file__, "model, other")

FactorName = Literal["lora_A", "lora_B"]
Box = tuple[slice, slice]


@dataclass(frozen=True)
class FactorShard:
    """The part of a whole factor that a rank holds."""

    shape: tuple[int, int]  # of the whole factor, (r, in) or (out, r); for an expert, of its own
    axis: int | None  # the axis that is divided; None: every rank of the group holds all of it
    runs: tuple[range, ...] = ()  # the indices along `axis` that this rank holds, in its order
    grain: int = 0  # a length that divides the lengths and starts of all runs, on every rank

    @property
    def local_shape(self) -> tuple[int, int]:
        if self.axis is None:
            return self.shape
        length = sum(map(len, self.runs))
        return (length, self.shape[1]) if self.axis == 0 else (self.shape[0], length)

    def boxes(self, length: int | None = None) -> Iterator[tuple[Box, Box]]:
        """Yield boxes that cover this rank's part: in the part, and in the whole factor.

        A divided factor has a box for each run, or for each `length` of a run.
        """
        if self.axis is None:
            everything = slice(0, self.shape[0]), slice(0, self.shape[1])
            yield everything, everything
        local = 0
        for run in self.runs:
            step = length or len(run)
            for start in run[::step]:
                yield self._box(local, step), self._box(start, step)
                local += step

    def _box(self, start: int, length: int) -> Box:
        rows, columns = (slice(0, size) for size in self.shape)
        along = slice(start, start + length)
        return (along, columns) if self.axis == 0 else (rows, along)


class Pair(nn.Module):
    """A (r, in) and B (out, r) of one Hugging Face tensor: scaling * B A x is added to its output.

    Call it to get the factors: Megatron's overlapped parameter gather waits for a weight when the
    module that owns it is called. The factors have the device and dtype of the base weight `like`.
    `expert` is an expert's number in the fused tensor, and the number of experts.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(
        self,
        name: str,
        a: FactorShard,
        b: FactorShard,
        *,
        scaling: float,
        like: Tensor,
        expert: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.scaling, self.expert = name, scaling, expert
        self.is_active = True  # see `without_factors`
        self.places: dict[FactorName, FactorShard] = {"lora_A": a, "lora_B": b}
        for factor, place in self.places.items():
            value = torch.zeros(place.local_shape, dtype=like.dtype, device=like.device)
            self.register_parameter(factor, nn.Parameter(value))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.lora_A, self.lora_B

    @property
    def rank(self) -> int:
        return self.places["lora_A"].shape[0]

    def whole_shape(self, factor: FactorName) -> tuple[int, int]:
        """Return the shape of the factor as PEFT stores it, with all experts together."""
        rows, columns = self.places[factor].shape
        experts = self.expert[1] if self.expert else 1
        return (rows * experts, columns) if factor == "lora_A" else (rows, columns * experts)

    def parts(self, factor: FactorName, tensor: Tensor) -> Iterator[tuple[Selection, Tensor]]:
        """Divide `tensor`, shaped like this rank's factor, into parts with boxes in PEFT's tensor.

        PEFT keeps all experts in one pair. The rows of A are ordered expert by expert. The columns
        of B are ordered rank by rank, with the experts next to one another.
        """
        for local, (rows, columns) in self.places[factor].boxes():
            if self.expert is not None:
                number, count = self.expert
                if factor == "lora_A":
                    first = number * self.rank
                    rows = slice(first + rows.start, first + rows.stop)
                else:
                    columns = slice(number, None, count)
            yield (rows, columns), tensor[local]


class AdapterModule(nn.Module):
    """All pairs of a chunk under their Hugging Face names, as in PEFT's ``base_model.model``.

    A pair is ``model.language_model.layers.3.self_attn.q_proj`` with ``lora_A`` and ``lora_B``.
    Layers are counted over the whole model. An expert's number is the last part of its name.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._groups = groups

    def put(self, pair: Pair) -> None:
        """Add a pair under its name."""
        path = pair.name.removesuffix(".weight").split(".")
        if pair.expert is not None:
            path.append(str(pair.expert[0]))
        parent: nn.Module = self
        for name in path[:-1]:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(path[-1], pair)

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Yield every pair of this rank's chunk with its path below the adapter."""
        for path, module in self.named_modules():
            if isinstance(module, Pair):
                yield path, module

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Declare the place of each factor's part in the whole factor.

        By default mcore would treat a linear's children as replicated: a run on two TP ranks would
        silently save the first rank's factors for both.
        """
        return {
            f"{prefix}{path}.{factor}": self._sharded_factor(pair, factor)
            for path, pair in self.pairs()
            for factor in pair.places
            if getattr(pair, factor).numel()
        }

    def _sharded_factor(
        self, pair: Pair, factor: FactorName
    ) -> ShardedTensor | ShardedTensorFactory:
        """Declare a factor's part: a factory divides it, if the grid has it in several pieces."""
        groups, place = self._groups, pair.places[factor]
        tp, copies = (
            (groups.tp, groups.dp_cp) if pair.expert is None else (groups.expt_tp, groups.expt_dp)
        )
        replica = (0, 0 if place.axis is not None else tp.rank(), copies.rank())
        key = f"adapter.{pair.name}.{factor}"
        build = partial(_grid_pieces, place, pair.expert)
        tensor = getattr(pair, factor)
        if place.axis is None or place.local_shape[place.axis] == place.grain:
            (only,) = build(key, tensor, replica)
            return only
        return ShardedTensorFactory(
            key, tensor, build, partial(_join, place.axis), replica_id=replica
        )


@contextmanager
def without_factors(adapters: Sequence[AdapterModule]) -> Iterator[None]:
    """Let the chunks of these adapters compute as if they had no factors.

    A tensor that an adapter trains whole, in place of a base weight, stays in use.
    """
    pairs = [pair for adapter in adapters for _, pair in adapter.pairs()]
    for pair in pairs:
        pair.is_active = False
    try:
        yield
    finally:
        for pair in pairs:
            pair.is_active = True


def _grid_pieces(
    place: FactorShard,
    expert: tuple[int, int] | None,
    key: str,
    tensor: Tensor,
    replica: Any,
    flattened_range: None = None,  # mcore's factories pass it
) -> list[ShardedTensor]:
    """Divide a factor into parts of one regular grid; a checkpoint can hold nothing else."""
    stacked = [(0, *expert)] if expert else []
    pieces = []
    for local, box_in_factor in place.boxes(place.grain):
        offsets = list(stacked)
        if place.axis is not None:
            start, count = box_in_factor[place.axis].start, place.shape[place.axis] // place.grain
            offsets.append((place.axis + len(stacked), start // place.grain, count))
        part = tensor if tensor[local].shape == tensor.shape else tensor[local]
        piece = ShardedTensor.from_rank_offsets(
            key, part, *offsets, replica_id=replica, prepend_axis_num=len(stacked)
        )
        pieces.append(piece)
    return pieces


@torch.no_grad()
def _join(axis: int, pieces: list[Tensor]) -> Tensor:
    """Undo :func:`_grid_pieces` for what was loaded."""
    return torch.cat(pieces, dim=axis)


Region = Callable[[Tensor], Tensor]
"""What ranks exchange at one place of an adapter."""

_LAYER = r"decoder\.layers\.\d+\."
_MLP = r"mlp\.(shared_experts\.)?"
_COLUMN = (
    rf"{_LAYER}(self_attention\.(linear_qkv|in_proj)|{_MLP}linear_fc1)\.weight|output_layer\.weight"
)
_ROW = rf"{_LAYER}(self_attention\.(linear_proj|out_proj)|{_MLP}linear_fc2)\.weight"
_EXPERT = rf"{_LAYER}mlp\.experts\.(local_experts\.\d+\.)?linear_fc([12])\.weight\d*"
_ROUTER = rf"{_LAYER}mlp\.router\.weight"
_VISION = (
    r"visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r"|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])\.weight"
)


_REGIONS: dict[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    0: (
        tensor_parallel.gather_from_sequence_parallel_region,
        tensor_parallel.copy_to_tensor_model_parallel_region,
    ),
    1: (
        tensor_parallel.reduce_scatter_to_sequence_parallel_region,
        tensor_parallel.reduce_from_tensor_model_parallel_region,
    ),
}
"""The regions after A under SP and without it, by the divided axis of the weight.

They make (s, B, r) of (s_local, B, r) for a column-parallel weight, and the reverse for the other.
"""


def same_region(activation: Tensor) -> Tensor:
    """Do nothing: no tensor parallelism, or inputs and weights are whole on every rank."""
    return activation


@dataclass(frozen=True)
class LinearKind:
    """The properties of a linear that its adapters depend on."""

    partition_dim: Literal[0, 1] | None  # the divided axis of the weight; None: all ranks hold all
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
        if self.expert or self.partition_dim is None:
            return same_region
        under_sp, without = _REGIONS[self.partition_dim]
        # The attribute is read at each call, because generation turns it off and on.
        return lambda x: (under_sp if linear.sequence_parallel else without)(x, group=self.group)

    @property
    def region_of_undivided_factor(self) -> Region:
        """The region for a factor that is not divided: an expert's gradient is summed over ETP.

        Megatron sums the gradients of other undivided factors, as `mark_factors` asks.
        """
        if not self.expert or self.group.size() == 1:
            return same_region
        return partial(tensor_parallel.copy_to_tensor_model_parallel_region, group=self.group)

    @property
    def inputs_differ(self) -> bool:
        """Whether the ranks of the group see different values of the input."""
        return self.partition_dim == 1 or (self.partition_dim == 0 and self.sequence_parallel)

    def mark_factors(self, pair: Pair, weight: Tensor) -> None:
        """Mark both factors, so that Megatron reduces and counts their gradients correctly."""
        # Like the weight's: the data-parallel group, and for undivided weights the sum over TP.
        names = ["allreduce"]
        if self.partition_dim is None:
            names += ["sequence_parallel", "average_gradients_across_tp_domain"]
        for factor, name in product((pair.lora_A, pair.lora_B), names):
            if hasattr(weight, name):
                setattr(factor, name, getattr(weight, name))
        if self.partition_dim is None:
            return
        divided, undivided = (
            (pair.lora_B, pair.lora_A) if self.partition_dim == 0 else (pair.lora_A, pair.lora_B)
        )
        set_tensor_model_parallel_attributes(divided, True, self.partition_dim, 1)
        if not self.expert:
            undivided.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]


def kind_of(chunk: Any, parameter: str) -> LinearKind | None:
    """Return the kind of a weight, by its local name; None: it cannot have an adapter."""
    groups, config = chunk.pg_collection, chunk.config
    rows_are_divided = re.fullmatch(_COLUMN, parameter)
    if rows_are_divided or re.fullmatch(_ROW, parameter):
        if groups.tp.size() == 1:
            return LinearKind(None, groups.tp)
        uneven = "linear_qkv" in parameter and config.num_query_groups % groups.tp.size()
        return LinearKind(
            0 if rows_are_divided else 1,
            groups.tp,
            config.sequence_parallel,
            head_rows=config.kv_channels if uneven else 0,
        )
    if expert := re.fullmatch(_EXPERT, parameter):
        axis: Literal[0, 1] = 0 if expert[2] == "1" else 1
        etp = groups.expt_tp
        return LinearKind(axis if etp.size() > 1 else None, etp, expert=True, grouped=not expert[1])
    if re.fullmatch(_ROUTER, parameter):
        return LinearKind(None, groups.tp, router=True)
    return LinearKind(None, groups.tp) if re.fullmatch(_VISION, parameter) else None


@cache
def weight_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return the shapes of the Hugging Face tensors, with experts laid out as in transformers 5."""
    return hf_shapes(table(architecture, expert_layout="v5"))


_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Site:
    """Adds ``scaling * B A x`` for all pairs of one linear to its output.

    There is one pair per Hugging Face tensor. The A factors of a fused linear read the same input,
    so they make one product; so do the B factors, see :meth:`matrix`. With dropout each pair has a
    mask of its own, as in PEFT, and so a product of its own for A.

    Args:
        rows: (rows,) int64, host: each row's place in the B factors below one another; -1: none.
        dropout: a probability, which counts while the pairs are in training mode.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        rows: Tensor,
        kind: LinearKind,
        linear: Any,
        dropout: float = 0.0,
    ) -> None:
        self.pairs, self._kind, self._rows = list(pairs), kind, len(rows)
        self._region, self._region_of_undivided_factor = (
            kind.region(linear),
            kind.region_of_undivided_factor,
        )
        self._dropout = dropout
        in_order = torch.arange(len(rows), device="cpu")
        filled = sum(len(pair.lora_B) for pair in pairs)
        order = rows.masked_scatter(rows < 0, in_order[filled:])  # rows of zeros come last
        self._order = None if torch.equal(order, in_order) else order
        scalings = {pair.scaling for pair in pairs}
        self._scaling = scalings.pop() if len(scalings) == 1 else None  # None: they differ

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """Add the adapters' part: a forward hook of the linear, for both layer specs."""
        output, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        x = inputs[0]
        if isinstance(output, tuple):  # Transformer Engine's fused norm returns the norm's output
            output, x = output
        output = self.add(x, output)
        return (output, *rest) if isinstance(outputs, tuple) else output

    @property
    def is_active(self) -> bool:
        """Whether the adapters act; see :func:`without_factors`."""
        return self.pairs[0].is_active

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' part for the input `x` to the linear's `output`, (..., rows)."""
        if not self.is_active:
            return output
        a, matrix, scaling = self._product_with_a(x, output.dtype)
        if output.shape[-1] != self._rows:  # the linear gathered it
            part = F.linear(a, matrix) * scaling
            return output + gather_from_tensor_model_parallel_region(part, group=self._kind.group)
        if output._is_view():  # autograd forbids in-place changes of a Function's views
            flat = output.reshape(-1, self._rows)
            flat = torch.addmm(flat, a.reshape(-1, a.shape[-1]), matrix.t(), alpha=scaling)
            return flat.view(output.shape)
        return _AddProduct.apply(output, a, matrix, scaling)

    def scaled_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the adapters' part for the input `x` (s_local, B, in).

        The first is (s, B, sum of ranks), with the scaling; the second is (rows, sum of ranks).
        """
        a, matrix, scaling = self._product_with_a(x, x.dtype)
        return a * scaling, matrix

    def _product_with_a(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """Return A times `x`, B, and the scaling of their product."""
        factors = [self.sum_undivided_gradients(*pair(), of=pair) for pair in self.pairs]
        # A router computes in float32.
        down, up = ([factor.to(dtype) for factor in side] for side in zip(*factors, strict=True))
        a = self._apply_a(x.to(dtype), down)
        if self._scaling is not None:
            return a, self.matrix(up), self._scaling
        # Scaling B instead would round its values in bf16, and the loss's error would pass 2 E.
        parts = zip(a.split([len(factor) for factor in down], -1), self.pairs, strict=True)
        return torch.cat([part * p.scaling for part, p in parts], -1), self.matrix(up), 1.0

    def matrix(self, factors: Sequence[Tensor]) -> Tensor:
        """Place the B factors (out_i, r_i) in one matrix (rows, sum of r_i), zero elsewhere.

        ``linear_qkv`` interleaves q, k and v by KV group. One product with this matrix gives its
        interleaved output, and nothing as large as an activation is rearranged.
        """
        empty = self._rows - sum(map(len, factors))
        if len(factors) == 1 and not empty:
            return factors[0]
        # The last rows are of nothing. Each of the others is read once, so that their gradients are
        # exact and need no sum.
        matrix = torch.block_diag(*factors, factors[0].new_empty(empty, 0))
        if self._order is None:
            return matrix
        self._order = to_device(self._order, matrix.device)
        return matrix.index_select(0, self._order)

    def sum_undivided_gradients(self, a: Tensor, b: Tensor, *, of: Pair) -> tuple[Tensor, Tensor]:
        """Sum the gradients of undivided factors over the ranks; factors of a pair, or stacked."""
        if of.places["lora_A"].axis is None:
            a = self._region_of_undivided_factor(a)
        if of.places["lora_B"].axis is None:
            b = self._region_of_undivided_factor(b)
        return a, b

    def _apply_a(self, x: Tensor, factors: list[Tensor]) -> Tensor:
        """Apply the A factors: (..., in) -> (..., sum of ranks)."""
        if self._dropout > 0 and self.pairs[0].training:
            # Ranks that hold different values of the input need different masks.
            states = get_cuda_rng_tracker().fork if self._kind.inputs_differ else nullcontext
            parts = []
            for a in factors:
                with states():
                    dropped = F.dropout(x, self._dropout)
                parts.append(F.linear(dropped, a))
            return self._region(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        return self._region(F.linear(x, factors[0] if len(factors) == 1 else torch.cat(factors)))


class GroupedSite:
    """Computes :class:`Site` for all experts of a rank, each on its own tokens, in two products.

    The sites are those of the rank's experts, in their order. Each has one pair, all have the same
    shape and scaling, and no dropout.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = list(sites)

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """Add the adapters' part: a hook of a linear that gets tokens (T, in) and groups."""
        if not self._sites[0].is_active:
            return outputs
        tokens, groups, *_ = inputs
        output, *rest = outputs
        # Transformer Engine's linear is called with numbers of tokens on the host.
        if not isinstance(groups, Groups):
            groups = Groups.from_counts(groups, tokens.device)
        return (self._add(tokens, output, groups), *rest)

    def _add(self, tokens: Tensor, output: Tensor, groups: Groups) -> Tensor:
        """Add the adapters' part to `output` (T, out)."""
        pairs = [pair for site in self._sites for pair in site.pairs]
        downs, ups = zip(*(pair() for pair in pairs), strict=True)
        # A (E, r, in) and B (E, out, r).
        down, up = self._sites[0].sum_undivided_gradients(
            torch.stack(downs), torch.stack(ups), of=pairs[0]
        )
        inner = grouped_product(tokens, down.to(output.dtype), groups) * pairs[0].scaling
        part = grouped_product(inner, up.to(output.dtype), groups)
        # Autograd forbids in-place changes of a Function's views.
        return output + part if output._is_view() else output.add_(part)


def adapt_router(router: Any, site: Site | None = None) -> None:
    """Add the part of `site` to the router's logits, in the dtype in which routing is computed.

    The gradient of a frozen weight is no longer computed, with a site or without; see
    `_router_logits`. The site of an mcore ``TopKRouter`` has one pair, whose factors are (r, H) and
    (E, r).
    """
    logits = partial(_router_logits, router)
    router.gating = logits if site is None else lambda hidden: site.add(hidden, logits(hidden))


def _router_logits(router: Any, hidden: Tensor) -> Tensor:
    """Compute the router's logits, without the gradient of a frozen weight.

    ``Router.gating`` computes that gradient even for a frozen weight. With Transformer Engine we
    keep ``Router.gating``: its product takes half precision and returns float32, for which torch's
    product would need a float32 copy of the input.
    """
    if router.weight.requires_grad or router.config.transformer_impl != "local":
        return type(router).gating(router, hidden)
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype, hidden.dtype)
    return F.linear(hidden.to(dtype), router.weight.to(dtype))


class _AddProduct(torch.autograd.Function):
    """Computes ``output + scaling * a @ matrix.T`` in place, without another wide tensor.

    `output` is (..., rows), `a` (..., rank) and `matrix` (rows, rank).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, a: Tensor, matrix: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(a, matrix)
        ctx.scaling = scaling
        ctx.mark_dirty(output)
        output.view(-1, len(matrix)).addmm_(a.reshape(-1, a.shape[-1]), matrix.t(), alpha=scaling)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        a, matrix = ctx.saved_tensors
        flat = gradient.reshape(-1, len(matrix))
        of_a = (flat @ matrix).mul_(ctx.scaling).view(a.shape)
        of_matrix = (flat.t() @ a.reshape(-1, a.shape[-1])).mul_(ctx.scaling)
        return gradient, of_a, of_matrix, None  # `output` is added as it is
