"""The dense MLP of both layer specs: SwiGLU as one operation that keeps its input only.

The SwiGLU of the torch spec's experts, here too, also multiplies by the router's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.recompute import remember

label_module(__file__, "MLP")


class GatedMLP(MLP):
    """mcore's MLP with our SwiGLU; without its fused kernels mcore's is a chain of operations.

    Source: HF ``Qwen3VLTextMLP``.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._swiglu = _fastest_swiglu(config)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Apply the MLP: (s, B, H) -> (s_local, B, H), and no bias."""
        halves, _bias = self.linear_fc1(hidden_states)  # (s, B, 2 * inner / tp): gate, then up
        inputs = halves.detach()
        inner = remember(self._swiglu(halves), lambda: self._swiglu(inputs))
        output, _bias = self.linear_fc2(inner)
        return output, None


def _fastest_swiglu(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return the fastest SwiGLU that is available."""
    if config.transformer_impl == "transformer_engine":
        from transformer_engine.pytorch.ops import SwiGLU

        return SwiGLU().__call__  # not a child, whose extra state would be in checkpoints
    if config.bias_activation_fusion:
        return lambda halves: bias_swiglu_impl(halves, None)
    return lambda halves: _SwiGLU.apply(halves, None)


def weighted_swiglu(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that experts apply: SwiGLU of each row times its routing weight.

    With ``--bias-swiglu-fusion`` it is Megatron's compiled one, otherwise ours, which keeps its
    inputs alone. It takes (T, 2 * inner) halves and (T,) weights of any dtype.
    """
    if config.bias_activation_fusion:
        return lambda halves, weights: weighted_bias_swiglu_impl(halves, None, weights[:, None])
    return _SwiGLU.apply


class _SwiGLU(torch.autograd.Function):
    """Computes ``silu(gate) * up`` without keeping ``silu(gate)``.

    If there are weights, multiplies each row by its own, in the weights' dtype.
    """

    @staticmethod
    def forward(ctx: Any, halves: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(halves, weights)
        product = _swiglu_product(halves)
        return product if weights is None else (product * weights[:, None]).to(halves.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        halves, weights = ctx.saved_tensors
        if weights is None:
            return _swiglu_gradient(halves, gradient), None
        of_weights = (gradient.to(weights.dtype) * _swiglu_product(halves)).sum(-1)
        weighted = (gradient * weights[:, None]).to(halves.dtype)
        return _swiglu_gradient(halves, weighted), of_weights


def _swiglu_product(halves: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, (..., inner), of (..., 2 * inner)."""
    gate, up = halves.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_gradient(halves: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient (..., 2 * inner) of the halves from the product's (..., inner)."""
    gate, up = halves.chunk(2, -1)
    result = torch.empty_like(halves)
    of_gate, of_up = result.chunk(2, -1)  # views, into which both kernels write
    torch.mul(gradient, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
    return result
