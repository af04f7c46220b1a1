"""Numbers for the log by part: gradient norms of vision, aligner and language, and the losses of
the data sets of a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """
    squares = torch.zeros(len(NAMES), device=torch.cuda.current_device())
    for chunk in model:
        parts = {parameter: part_of(name) for name, parameter in chunk.named_parameters()}
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
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


class DataSetLosses:
    """Sums of data sets' losses that stay on the device until the log is written.

    All ranks make it with the same names of data sets in the same order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._loss = ""
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: str, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a micro-batch, without a host sync.

        `parts` are, by the name of each data set, the sum of its losses and its normaliser.
        """
        self._loss = loss
        for name, part in parts.items():
            pair = torch.stack([value.detach().double() for value in part])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def report(self) -> dict[str, float]:
        """Return the mean loss of each data set since the last report, over all ranks.

        All ranks call this. Those before the last pipeline stage, which have no loss, get nothing.
        A data set without a trained token since then is left out.
        """
        if not self._names or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        sums = torch.stack([self._sums.get(name, nothing) for name in self._names])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        self._sums = {}
        return {
            f"{self._loss} {name}": total / normaliser
            for name, (total, normaliser) in zip(self._names, sums.tolist(), strict=True)
            if normaliser
        }
