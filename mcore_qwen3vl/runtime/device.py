"""The device that a process computes on, which must be prepared before megatron is imported."""

from __future__ import annotations

from mcore_qwen3vl.runtime import cpu as cpu_backend
from mcore_qwen3vl.runtime.gpus import disable_compile_without_compiler, order_transfers


def prepare_device(*, cpu: bool, training: bool = False, several_queues: bool = False) -> None:
    """Prepare this process, and those that it starts, for the CPU or for GPUs.

    Args:
        training: whether ``megatron.training`` is used; see :func:`.cpu.install`.
        several_queues: see :func:`.gpus.order_transfers`.

    Raises:
        BadInput: this process can no longer use the CPU; see :func:`.cpu.install`.
    """
    if cpu:
        cpu_backend.install(training=training)
    else:
        order_transfers(several_queues=several_queues)
        disable_compile_without_compiler()
