"""The RMSNorm of the ``torch`` layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.recompute import remember

label_module(__file__, "norms")


class RMSNorm(nn.Module):
    """A root mean square norm that keeps its input for the backward pass, without a float32 copy.

    A norm of weights that are differences from one does so only in a layer that recomputes.
    In half precision it rounds once, like Transformer Engine's norm; Hugging Face's norm also
    rounds before it multiplies by the weight. mcore's ``WrappedTorchNorm`` refuses sequence
    parallelism. This norm marks its weight, so that its gradient, of which each rank has a part, is
    summed over the TP group. Source: HF ``Qwen3VLTextRMSNorm``; of weights that are differences
    from one, ``Qwen3_5RMSNorm``.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.full((hidden_size,), float(not self.zero_centered), dtype=config.params_dtype)
        self.weight = nn.Parameter(start)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., hidden_size), keeping shape and dtype; the mean is taken in float32."""
        if self.zero_centered:  # HF adds one and multiplies in float32, and rounds once
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1 + self.weight.to(wide)
            return F.rms_norm(_widen(x, wide), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
