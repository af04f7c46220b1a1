"""A model without Megatron's training loop: its chunks on this rank, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.transformer_config import Spec


def build_chunks(
    architecture: Architecture,
    layout: Layout,
    *,
    spec: Spec = "torch",
    kind: type[Qwen3VLModel] = Qwen3VLModel,
    **overrides: Any,
) -> list[Qwen3VLModel]:
    """Build the pipeline chunks of this rank, of the class `kind`, with random weights.

    The process groups exist, and are those of `layout`. The other arguments are those of
    :meth:`Qwen3VLModel.from_hf_config`, and override the layout's.
    """
    return [
        kind.from_hf_config(
            architecture,
            spec=spec,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
            **{**layout.config_overrides(), **overrides},
        )
        for stage in (range(layout.vpp) if layout.vpp > 1 else [None])
    ]


class WithoutDDP:
    """A chunk with the DDP interface that ``finalize_model_grads`` needs; uses ``grad``."""

    def __init__(self, module: Qwen3VLModel) -> None:
        self.module, self.config = module, module.config
        self.ddp_config = DistributedDataParallelConfig()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Sum over the ranks that have other tokens: DP x CP, and for experts their own DP."""
        groups: Any = self.module.pg_collection
        for parameter in self._trained():
            group = groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp
            if parameter.grad is None:  # on this rank; another may have one
                parameter.grad = torch.zeros_like(parameter)
            if group.size() > 1:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=group)

    def scale_gradients(self, factor: Tensor) -> None:
        for parameter in self._trained():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    def _trained(self) -> list[nn.Parameter]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if any(hasattr(parameter, "main_grad") for parameter in trained):
            raise BadInput(
                "The model is wrapped in Megatron's DDP, which keeps its gradients in main_grad: "
                "call megatron.core.distributed.finalize_model_grads instead of reduce_gradients."
            )
        return trained
