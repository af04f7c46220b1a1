"""Vision blocks whose backward makes again what is cheap to make: norms' outputs and activations.

A linear layer keeps its input for the gradient of its weight. Where that input is the output of a
norm or an activation function, whose own input is kept anyway, it is computed again from it, with
the same kernel and so the same bits: six of the sixteen vectors of hidden size that a block keeps
for a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def make_lean(block: nn.Module) -> None:
    """Change a ``Qwen3VLVisionBlock`` in place; its parameters stay the same objects.

    Args:
        block: as Hugging Face builds it.
    """
    norms: list[Any] = [block.get_submodule("norm1"), block.get_submodule("norm2")]
    linears = ("attn.qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    for norm in norms:
        norm.__class__ = _LayerNorm
    for name in linears:
        block.get_submodule(name).__class__ = _Linear
    mlp: Any = block.get_submodule("mlp")
    mlp.act_fn = _Activation(mlp.act_fn)


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        # Not by calling the module: hooks of Megatron's are for the forward pass.
        return _remembering(
            super().forward(x),
            lambda: F.layer_norm(
                x.detach(), self.normalized_shape, self.weight, self.bias, self.eps
            ),
        )


class _Activation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return _remembering(self._function(x), lambda: self._function(x.detach()))


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        again = getattr(x, "made_again", None)
        if again is None or not torch.is_grad_enabled():
            return super().forward(x)
        with saved_tensors_hooks(_Instead(x, again).pack, _unpack):
            return super().forward(x)


def _remembering(output: Tensor, again: Callable[[], Tensor]) -> Tensor:
    output.made_again = again  # type: ignore[attr-defined]
    return output


class _Instead:
    """Keeps how to make a tensor, not the tensor."""

    def __init__(self, tensor: Tensor, again: Callable[[], Tensor]) -> None:
        self._storage, self._again = tensor.untyped_storage().data_ptr(), again

    def pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        if saved.untyped_storage().data_ptr() != self._storage:
            return saved
        again, view = self._again, (saved.size(), saved.stride(), saved.storage_offset())
        return lambda: again().as_strided(*view)


@torch.no_grad()
def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()
