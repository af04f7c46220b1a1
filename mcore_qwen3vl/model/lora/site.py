"""The place where adapters act: one linear, with all Hugging Face tensors that it holds.

Two linears are special: a grouped one holds all experts of a rank, and a router computes its logits
in a method and not in a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.lora.adapter_module import Pair
from mcore_qwen3vl.model.lora.kinds import Kind

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
        self, pairs: Sequence[Pair], rows: Tensor, kind: Kind, linear: Any, dropout: float = 0.0
    ) -> None:
        self.pairs, self._kind, self._rows = list(pairs), kind, len(rows)
        self._region, self._whole = kind.region(linear), kind.whole
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
    def on(self) -> bool:
        """Whether the adapters act; see :func:`.adapter_module.switched_off`."""
        return self.pairs[0].on

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' part for the input `x` to the linear's `output`, (..., rows)."""
        if not self.on:
            return output
        a, matrix, scaling = self._product(x, output.dtype)
        if output.shape[-1] != self._rows:  # the linear gathered it
            part = F.linear(a, matrix) * scaling
            return output + gather_from_tensor_model_parallel_region(part, group=self._kind.group)
        if output._is_view():  # autograd forbids in-place changes of a Function's views
            flat = output.reshape(-1, self._rows)
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
            return a, self.matrix(up), self._scaling
        # Scaling B instead would round its values in bf16, and the loss's error would pass 2 E.
        parts = zip(a.split([len(one) for one in down], -1), self.pairs, strict=True)
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
