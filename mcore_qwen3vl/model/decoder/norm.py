"""RMSNorm of the ``torch`` layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm that keeps its input for the backward pass, without a float32 copy.

    In half precision it rounds once, as Transformer Engine's does; Hugging Face's rounds before it
    multiplies by the weight too. mcore's ``WrappedTorchNorm`` refuses sequence parallelism; this
    one marks its weight, so that its gradient, of which each rank has a part, is summed over the
    TP group. Source: HF ``Qwen3VLTextRMSNorm``.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> same shape and dtype; the mean is taken in float32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class StandaloneRMSNorm(RMSNorm):
    """A norm that Transformer Engine's spec keeps as a module of its own.

    It fuses the others into the linear layer that follows. Its own module has an extra state in
    checkpoints; an empty one here gives both specs the same keys.
    """

    def get_extra_state(self) -> None: ...

    def set_extra_state(self, state: object) -> None: ...
