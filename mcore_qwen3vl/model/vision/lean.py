"""Vision blocks that recompute the outputs of norms and activation functions in the backward pass.

This saves six of the vectors of hidden size that a block would keep for each patch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

from mcore_qwen3vl.model.recompute import recomputing, remember_outputs_of


def make_lean(block: nn.Module) -> None:
    """Let a block recompute cheap outputs; it is changed in place and keeps its parameters.

    Args:
        block: a ``Qwen3VLVisionBlock`` as Hugging Face builds it.
    """
    block.__class__ = _LeanBlock
    for name in ("norm1", "norm2", "mlp.act_fn"):
        remember_outputs_of(block.get_submodule(name))


class _LeanBlock(Qwen3VLVisionBlock):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with recomputing():
            output: Tensor = super().forward(*args, **kwargs)
        return output
