"""The gradient norm of each part: vision, aligner, language."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from mcore_qwen3vl.model.freeze import PARTS, part_of

NAMES = tuple(PARTS)


def part_grad_norms(model: list[Any]) -> dict[str, Tensor]:
    """Return the 2-norm of each part's gradient over all ranks.

    All ranks call this, after the gradients are reduced.

    Args:
        model: this rank's DDP-wrapped pipeline chunks.
    """
    squares = torch.zeros(len(NAMES), device=torch.cuda.current_device())
    for chunk in model:
        parts = {parameter: part_of(name) for name, parameter in chunk.named_parameters()}
        for buffer in chunk.buffers:
            _add_squares(squares, buffer, parts, chunk)
        for buffer in chunk.expert_parallel_buffers:
            _add_squares(squares, buffer, parts, chunk)
    dist.all_reduce(squares)
    return dict(zip(NAMES, squares.sqrt(), strict=True))


def _add_squares(squares: Tensor, buffer: Any, parts: dict[nn.Parameter, Any], chunk: Any) -> None:
    """Add this rank's share: its shard of each bucket, or, unsharded, all on the first DP rank."""
    sharded = chunk.ddp_config.use_distributed_optimizer
    group = buffer.data_parallel_group
    if not sharded and group.rank() != 0:
        return
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // (group.size() if sharded else 1)
        first = group.rank() * size if sharded else 0
        for parameter in bucket.params:
            if not _is_counted(parameter):
                continue
            start, end, _ = buffer.param_index_map[parameter]
            low = max(start - bucket.offset, first)
            high = min(end - bucket.offset, first + size)
            if low < high:
                part = NAMES.index(parts[parameter])
                squares[part] += bucket.grad_data[low:high].float().square().sum()


def _is_counted(parameter: nn.Parameter) -> bool:
    """Return whether to count this copy: as in mcore's norm, ties and TP replicas count once."""
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
        parameter,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )
