"""Gradient norm, clipping and Adam over all tensors at once, without Transformer Engine or Apex.

mcore's own fallbacks for their kernels take a host sync per tensor (the norm), or a launch and a
temporary per tensor (clipping). torch's default Adam takes temporaries of the parameters' size.
torch has kernels over lists of tensors for all three.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from mcore_qwen3vl.training.step.optimizer import chained_optimizers


def install() -> None:
    """Give mcore's gradient clipping the functions below, if it has only its own fallbacks."""
    if clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm:
        return
    clip_grads.l2_norm_impl = l2_norm
    clip_grads.multi_tensor_scale_impl = scale
    clip_grads.multi_tensor_scale_tensor_impl = scale


def l2_norm(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Return the (1,) float32 norm of all values, like Apex's ``multi_tensor_l2norm``."""
    norms = torch._foreach_norm([tensor for one in tensors for tensor in one])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float | Tensor
) -> None:
    """Write the first list times `factor` into the second, as ``multi_tensor_scale`` does."""
    source, target = tensors
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor.reshape(()) if isinstance(factor, Tensor) else factor)


def use_fused_adam(optimizer: Any) -> None:
    """Let torch's Adam update parameters without temporaries.

    On a GPU one kernel updates many parameters; on the CPU it takes one pass over the memory
    instead of a dozen.
    """
    for part in chained_optimizers(optimizer):
        adam = getattr(part, "optimizer", None)
        if isinstance(adam, torch.optim.Adam):
            _set_fused(adam)
            # A loaded checkpoint's groups bring the setting of the run that wrote it.
            adam.register_load_state_dict_post_hook(_set_fused)


def _set_fused(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            if "step" in adam.state.get(parameter, {}):
                state = adam.state[parameter]
                state["step"] = state["step"].to(parameter.device)
