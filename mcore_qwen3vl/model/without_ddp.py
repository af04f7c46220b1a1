"""The gradients of a chunk without Megatron's DDP, in a program that has its own optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

label_module(__file__, "model, other")


class WithoutDDP:
    """A chunk with the DDP interface that ``finalize_model_grads`` needs; uses ``grad``."""

    def __init__(self, module: Qwen3VLModel) -> None:
        self.module, self.config = module, module.config
        self.ddp_config = DistributedDataParallelConfig()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Sum over the ranks that have other tokens: DP x CP, and for experts their own DP."""
        groups: Any = self.module.pg_collection
        for parameter in self._trained_parameters():
            group = groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp
            if parameter.grad is None:  # on this rank; another may have one
                parameter.grad = torch.zeros_like(parameter)
            if group.size() > 1:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=group)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients in place; :meth:`finish_grad_sync` has made those missing."""
        for parameter in self._trained_parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    def _trained_parameters(self) -> list[nn.Parameter]:
        """Return them, or raise BadInput if Megatron's DDP holds their gradients."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if any(hasattr(parameter, "main_grad") for parameter in trained):
            raise BadInput(
                "The model is wrapped in Megatron's DDP, which keeps its gradients in main_grad: "
                "call megatron.core.distributed.finalize_model_grads instead of reduce_gradients."
            )
        return trained
