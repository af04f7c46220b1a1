"""Gradients of weights, which the product that computes them adds to Megatron's buffer.

The product adds to the float32 buffer itself. Without this, it is rounded to the weight's dtype,
written, read again, and added by another kernel. Megatron takes the fused product for its own
linear layers from Apex. PyTorch has one too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import (
    LinearWithGradAccumulationAndAsyncCommunication as MegatronLinear,
)
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of `a` (m, k) and `b` (k, n), of one dtype, to `total` (m, n), in place."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # adds before it rounds; the CPU has no such kernel
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def stand_in_gradient(weight: Tensor) -> Tensor | None:
    """Tell DDP that `weight`'s gradient is in ``main_grad``, and return what autograd must pass on.

    DDP's hook runs when a gradient arrives, and ignores its values. A tied head needs none: the
    embedding's gradient reaches the same hook, which adds it.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def weight_gradient(weight: Tensor, gradient: Tensor, inputs: Tensor) -> Tensor | None:
    """Return the gradient of a linear's weight (out, in), or add it to DDP's ``main_grad``.

    It is added if :func:`accumulate_weight_gradient` marked the weight, and DDP has its buffer.

    Args:
        gradient: (n, out), that of the linear's output.
        inputs: (n, in)
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None or not getattr(weight, "accumulates_gradient", False):
        return gradient.t() @ inputs
    add_product(buffer, gradient.t(), inputs)
    return stand_in_gradient(weight)


def accumulate_weight_gradient(weight: Tensor) -> None:
    """Let the product that makes the gradient of a weight of :func:`linear` add it to its buffer.

    It is what ``gradient_accumulation_fusion`` does to Megatron's linears.
    """
    weight.accumulates_gradient = True  # type: ignore[attr-defined]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute what :func:`torch.nn.functional.linear` does, with :func:`weight_gradient`."""
    output: Tensor = _PlainLinear.apply(inputs, weight, bias)
    return output


class _PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parameter = weight  # unpacked, it lacks the attributes that DDP has set
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            gradient @ weight if of_inputs else None,
            weight_gradient(ctx.parameter, flat, inputs.flatten(0, -2)) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def accumulate_in_products() -> None:
    """Let ``gradient_accumulation_fusion`` work without Apex, and where outputs are recomputed."""
    layers.LinearWithGradAccumulationAndAsyncCommunication = _Linear
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
        )
        layers._grad_accum_fusion_available = True


def _accumulate(inputs: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """Do what Apex's ``wgrad_gemm_accum_fp32`` does."""
    add_product(main_grad, gradient.t(), inputs)


class _Linear(MegatronLinear):
    """Keeps the parameter, so that its attributes are known in the backward pass.

    Where a hook packs saved tensors, autograd unpacks a parameter as another object, without the
    attributes that DDP has set. Megatron then returns no gradient, and DDP's hook refuses that if
    it overlaps reductions.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, *others: Any) -> Tensor:
        ctx.parameter = weight
        output: Tensor = MegatronLinear.forward(ctx, inputs, weight, *others)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs, of_weight, *others = MegatronLinear.backward(ctx, gradient)
        added = ctx.gradient_accumulation_fusion and ctx.main_grad is not None
        if added and of_weight is None and hasattr(ctx.parameter, "grad_added_to_main_grad"):
            of_weight = stand_in_gradient(ctx.parameter)
        return of_inputs, of_weight, *others
