"""The place where adapters act: one linear, with all Hugging Face tensors that it holds.

Two linears are special: a grouped one holds all experts of a rank, and a router computes its logits
in a method and not in a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product
from mcore_qwen3vl.model.lora.adapter_module import Pair
from mcore_qwen3vl.model.lora.kinds import Kind

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Site:
    """Adds ``scaling * B A x`` for all pairs of one linear to its output.

    The A factors of a fused linear read the same input, so they make one product. So do the B
    factors, see :class:`Blocks`. With dropout each pair has a mask of its own, as in PEFT, and so a
    product of its own for A.

    There is one pair per Hugging Face tensor, and `blocks` are the places of their rows in the
    output. Dropout is a probability, which counts while the pairs are in training mode.
    """

    def __init__(
        self, pairs: Sequence[Pair], blocks: Blocks, kind: Kind, linear: Any, dropout: float = 0.0
    ) -> None:
        self.pairs, self.blocks, self._kind = list(pairs), blocks, kind
        self._region, self._whole = kind.region(linear), kind.whole
        self._dropout = dropout
        scalings = [pair.scaling for pair in self.pairs]
        self._scaling = scalings[0] if len(set(scalings)) == 1 else None
        self._scalings: Tensor | None = None
        if self._scaling is None:
            ranks = torch.tensor([pair.rank for pair in self.pairs], device="cpu")
            self._scalings = torch.tensor(scalings, device="cpu").repeat_interleave(ranks)

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """Add the adapters' part: a forward hook of the linear, for both layer specs."""
        output, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        x = inputs[0]
        if isinstance(output, tuple):  # Transformer Engine's fused norm returns the norm's output
            output, x = output
        output = self.add(x, output)
        return (output, *rest) if isinstance(outputs, tuple) else output

    @property
    def on(self) -> bool:
        """Whether the adapters act; see :func:`.adapter_module.switched_off`."""
        return self.pairs[0].on

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' part for the input `x` to the linear's `output`, (..., rows)."""
        if not self.on:
            return output
        a, matrix, scaling = self._product(x, output.dtype)
        if output.shape[-1] != self.blocks.rows:  # the linear gathered it
            part = F.linear(a, matrix) * scaling
            return output + gather_from_tensor_model_parallel_region(part, group=self._kind.group)
        if output._is_view():  # autograd forbids in-place changes of a Function's views
            flat = output.reshape(-1, self.blocks.rows)
            flat = torch.addmm(flat, a.reshape(-1, a.shape[-1]), matrix.t(), alpha=scaling)
            return flat.view(output.shape)
        return _AddProduct.apply(output, a, matrix, scaling)

    def factored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the adapters' part for the input `x` (s_local, B, in).

        The first is (s, B, sum of ranks), with the scaling; the second is (rows, sum of ranks).
        """
        a, matrix, scaling = self._product(x, x.dtype)
        return a * scaling, matrix

    def _product(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """Return A times `x`, B, and the scaling of their product."""
        factors = [self.whole(*pair(), of=pair) for pair in self.pairs]
        # A router computes in float32.
        down, up = ([one.to(dtype) for one in side] for side in zip(*factors, strict=True))
        a = self._down(x.to(dtype), down)
        if self._scaling is not None:
            return a, self.blocks.matrix(up), self._scaling
        assert self._scalings is not None
        self._scalings = self._scalings.to(a.device, a.dtype)
        return a * self._scalings, self.blocks.matrix(up), 1.0

    def whole(self, a: Tensor, b: Tensor, *, of: Pair) -> tuple[Tensor, Tensor]:
        """Apply `Kind.whole` to the undivided factors of a pair, or of stacked pairs like it."""
        if of.places["lora_A"].axis is None:
            a = self._whole(a)
        if of.places["lora_B"].axis is None:
            b = self._whole(b)
        return a, b

    def _down(self, x: Tensor, factors: list[Tensor]) -> Tensor:
        """Apply the A factors: (..., in) -> (..., sum of ranks)."""
        if self._dropout > 0 and self.pairs[0].training:
            # Ranks that hold different values of the input need different masks.
            states = get_cuda_rng_tracker().fork if self._kind.distinct else nullcontext
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
        """Add the adapters' part: a forward hook of a linear called with tokens (T, in) and groups.

        Transformer Engine's linear is called with numbers of tokens on the host instead of groups.
        """
        if not self._sites[0].on:
            return outputs
        tokens, groups, *_ = inputs
        output, *rest = outputs
        if not isinstance(groups, Groups):
            groups = Groups.of(groups, tokens.device)
        return (self._add(tokens, output, groups), *rest)

    def _add(self, tokens: Tensor, output: Tensor, groups: Groups) -> Tensor:
        """Add the adapters' part to `output` (T, out)."""
        pairs = [pair for site in self._sites for pair in site.pairs]
        downs, ups = zip(*(pair() for pair in pairs), strict=True)
        # A (E, r, in) and B (E, out, r).
        down, up = self._sites[0].whole(torch.stack(downs), torch.stack(ups), of=pairs[0])
        inner = grouped_product(tokens, down.to(output.dtype), groups) * pairs[0].scaling
        part = grouped_product(inner, up.to(output.dtype), groups)
        # Autograd forbids in-place changes of a Function's views.
        return output + part if output._is_view() else output.add_(part)


def adapt_router(router: Any, site: Site | None = None) -> None:
    """Add the part of `site` to the router's logits, in the dtype in which routing is computed.

    The gradient of a frozen weight is no longer computed, with a site or without; see `_logits`.
    The site of an mcore ``TopKRouter`` has one pair, whose factors are (r, H) and (E, r).
    """
    logits = partial(_logits, router)
    router.gating = logits if site is None else lambda hidden: site.add(hidden, logits(hidden))


def _logits(router: Any, hidden: Tensor) -> Tensor:
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
    """Computes ``output + scaling * a @ matrix.T`` in place, without another wide tensor."""

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
        return gradient, of_a, of_matrix, None


@dataclass(frozen=True)
class Blocks:
    """The B factors of fused tensors as one matrix, whose rows are those of the fused linear.

    ``linear_qkv`` interleaves q, k and v by KV group. We put their B factors, of shapes (out_i,
    r_i), into one (rows, r_1 + r_2 + r_3) matrix that is zero outside of its blocks. One product
    then gives the interleaved output, and nothing as large as an activation is rearranged.
    """

    rows: int  # of the fused linear, on this rank
    shapes: tuple[tuple[int, int], ...]  # (out_i, r_i) of each factor, on this rank
    # For each run of rows: its first row in the fused linear, the number of the factor, its first
    # row in the factor, and its length.
    placed: tuple[tuple[int, int, int, int], ...]

    def matrix(self, factors: Sequence[Tensor]) -> Tensor:
        """Assemble the (rows, sum of r_i) matrix; differentiable."""
        if len(self.shapes) == 1 and self.placed == ((0, 0, 0, self.rows),):
            return factors[0]
        return _Assemble.apply(self, *factors)


@lru_cache(maxsize=64)  # all layers are alike
def _indices(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Map each value of the matrix to its place among the factors' values, and back.

    The factors' values lie one factor after another, followed by a zero for all other places.
    """
    sizes, ranks = [rows * rank for rows, rank in blocks.shapes], [r for _, r in blocks.shapes]
    values = torch.arange(sum(sizes), dtype=torch.int32).split(sizes)
    forward = torch.full((blocks.rows, sum(ranks)), sum(sizes), dtype=torch.int32)
    columns = forward.split(ranks, 1)
    for row, number, first, count in blocks.placed:
        of_factor = values[number].view(blocks.shapes[number])
        columns[number][row : row + count] = of_factor[first : first + count]
    inverse = torch.empty(sum(sizes) + 1, dtype=torch.int32)
    inverse[forward.flatten().long()] = torch.arange(forward.numel(), dtype=torch.int32)
    return forward.flatten().to(device), inverse[:-1].to(device)


class _Assemble(torch.autograd.Function):
    """Assembles the matrix with two kernels in each direction.

    The backward of plain indexing would add up the gradients of all zeros one by one.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, *factors: Tensor) -> Tensor:
        ctx.blocks = blocks
        forward, _ = _indices(blocks, factors[0].device)
        values = torch.cat([*(f.flatten() for f in factors), factors[0].new_zeros(1)])
        return values.index_select(0, forward).view(blocks.rows, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        blocks = ctx.blocks
        _, inverse = _indices(blocks, gradient.device)
        values = gradient.reshape(-1).index_select(0, inverse)
        parts = values.split([rows * rank for rows, rank in blocks.shapes])
        return None, *(p.view(s) for p, s in zip(parts, blocks.shapes, strict=True))
