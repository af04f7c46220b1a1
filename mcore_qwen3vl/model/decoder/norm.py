"""The RMSNorm of the ``torch`` layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.kernels.norm import fits, norm_gradients, normalise
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.recompute import remember

label_module(__file__, "norms")


class RMSNorm(nn.Module):
    """A root mean square norm that keeps its input for the backward pass, without a float32 copy.

    Without our kernels, a norm whose weights are differences from one does so only in a recomputing
    layer. In half precision it rounds once, like Transformer Engine's norm; Hugging Face's norm
    also rounds before it multiplies by the weight. mcore's ``WrappedTorchNorm`` refuses sequence
    parallelism. This norm marks its weight, so that its gradient, of which each rank has a part, is
    summed over the TP group. Source: HF ``Qwen3VLTextRMSNorm``; of weights that are differences
    from one, ``Qwen3_5RMSNorm``.
    """

    gives_residual = False
    """Whether to return the input too, as Megatron's layer takes it from a norm."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.full((hidden_size,), float(not self.zero_centered), dtype=config.params_dtype)
        self.weight = nn.Parameter(start)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise (..., hidden_size), keeping shape and dtype; the mean is taken in float32.

        With :attr:`gives_residual`, our kernels and gradients, the input is returned too. What is
        computed from this residual has its gradient added to the norm's by the norm's kernel.
        """
        if fits(x):
            offset = float(self.zero_centered)
            gives = self.gives_residual and torch.is_grad_enabled()
            result: Tensor | tuple[Tensor, Tensor]
            result = _RMSNorm.apply(x, self.weight, self.eps, offset, gives)
            return result
        if self.zero_centered:  # HF adds one and multiplies in float32, and rounds once
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1 + self.weight.to(wide)
            return F.rms_norm(_widen(x, wide), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """The norm by our kernels, with the input as a second output if it `gives` that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, gives: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed, statistics, _ = normalise(x, weight, None, eps, offset=offset)
        ctx.save_for_backward(x, weight, statistics)
        ctx.offset = offset
        return (normed, x) if gives else normed

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, of_residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        of_x, of_weight, _ = norm_gradients(
            gradient,
            *ctx.saved_tensors,
            offset=ctx.offset,
            of_x=of_residual,
            of_parameters=ctx.needs_input_grad[1],
        )
        return of_x, of_weight, None, None, None


def _widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a wider dtype; in a layer that recomputes, the backward pass casts once more."""
    if x.dtype == dtype:
        return x
    narrow = x.detach()
    return remember(x.to(dtype), lambda: narrow.to(dtype))


class StandaloneRMSNorm(RMSNorm):
    """A norm that Transformer Engine's spec keeps as a module of its own.

    That spec fuses the other norms into the linear layer that follows. A module of its own has an
    extra state in checkpoints; an empty one here gives both specs the same keys.
    """

    def get_extra_state(self) -> None: ...  # torch calls both only if a class has its own

    def set_extra_state(self, state: object) -> None: ...
