"""The part of the reduced gradients that a rank of the distributed optimizer has.

Megatron's DDP keeps gradients in buffers, and reduces each bucket of a buffer by itself. With the
distributed optimizer a rank gets the sums of one shard of a bucket. In the other shards there
remain sums over some ranks, which nothing reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, "optimizer, temporary")


def shard_of_rank(bucket: Any, buffer: Any) -> tuple[int, int]:
    """Return the number of values of a bucket's shards, and where that of this rank begins."""
    group = buffer.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    return size, group.rank() * size


def scale_gradients(chunk: Any, factor: Tensor) -> None:
    """Multiply the reduced gradients of Megatron's DDP by a scalar on their device.

    Megatron's own function multiplies all shards, which takes DP times as long.
    """
    # An all-reduce in the place of the reduce-scatter makes every shard whole, to be saved.
    if not chunk.ddp_config.use_distributed_optimizer or chunk.force_all_reduce:
        chunk.scale_gradients(factor)
        return
    own = []
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            size, first = shard_of_rank(bucket, buffer)
            own.append(bucket.grad_data[first : first + size])
        own += buffer.extra_main_grads
    if own:  # a pipeline stage may be frozen
        torch._foreach_mul_(own, factor)
