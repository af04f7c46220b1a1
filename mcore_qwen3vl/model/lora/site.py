"""The place where adapters act: one linear, with all Hugging Face tensors that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.model.lora.blocks import Blocks
from mcore_qwen3vl.model.lora.pair import Pair
from mcore_qwen3vl.model.lora.regions import Region, local


class Site:
    """Adds ``scaling * B A x`` for all pairs of one linear to its output.

    The A factors of a fused linear read the same input, so they make one product. So do the B
    factors, see :mod:`mcore_qwen3vl.model.lora.blocks`. With dropout each pair has a mask of its
    own, as in PEFT, and so a product of its own for A.

    Args:
        pairs: one per Hugging Face tensor.
        blocks: places of their rows in the output.
        region: communication of the rank-r activation between A and B.
        whole: applied to the factors that are not divided; see ``regions.summed_over``.
        dropout: probability, while the pairs are in training mode.
        distinct: whether the TP ranks hold different values of the input, so that their dropout
            masks must differ.
        group: group over which outputs are gathered, if the linear gathers its own.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        blocks: Blocks,
        *,
        region: Region = local,
        whole: Region = local,
        dropout: float = 0.0,
        distinct: bool = False,
        group: Any = None,
    ) -> None:
        self.pairs, self.blocks = list(pairs), blocks
        self._region, self._whole = region, whole
        self._dropout, self._distinct, self._group = dropout, distinct, group
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
            return output + gather_from_tensor_model_parallel_region(part, group=self._group)
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
        down, up = zip(*(self._factors(pair, dtype) for pair in self.pairs), strict=True)
        a = self._down(x.to(dtype), down)
        if self._scaling is not None:
            return a, self.blocks.matrix(up), self._scaling
        assert self._scalings is not None
        self._scalings = self._scalings.to(a.device, a.dtype)
        return a * self._scalings, self.blocks.matrix(up), 1.0

    def _factors(self, pair: Pair, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A and B in `dtype`; see :meth:`whole`."""
        a, b = self.whole(*pair(), of=pair)
        return a.to(dtype), b.to(dtype)  # a router computes in float32

    def whole(self, a: Tensor, b: Tensor, *, of: Pair) -> tuple[Tensor, Tensor]:
        """Apply `whole` to the undivided factors of a pair, or of several stacked pairs like it."""
        if of.places["lora_A"].axis is None:
            a = self._whole(a)
        if of.places["lora_B"].axis is None:
            b = self._whole(b)
        return a, b

    def _down(self, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Apply the A factors: (..., in) -> (..., sum of ranks)."""
        dropping = self._dropout > 0 and self.pairs[0].training
        if dropping:
            parts = [F.linear(self._drop(x), a) for a in factors]
            return self._region(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        return self._region(
            F.linear(x, factors[0] if len(factors) == 1 else torch.cat(list(factors)))
        )

    def _drop(self, x: Tensor) -> Tensor:
        if not self._distinct:
            return F.dropout(x, self._dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self._dropout)


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
