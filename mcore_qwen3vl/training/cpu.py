"""``megatron.training`` on the CPU: what its loop asks CUDA for beside megatron-core.

As in :mod:`mcore_qwen3vl.runtime.cpu`, each replacement states its reason, and a missing symbol is
an error, not a silent no-op.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from mcore_qwen3vl.runtime.cpu import Replacement

_TRAINING = "megatron.training.training"


def _initialize_without_cuda(initialize: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_on_cpu(*args: Any, **kwargs: Any) -> Any:
        # Process groups are only set up where there is a device.
        with mock.patch.object(torch.cuda, "device_count", return_value=1):
            return initialize(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_on_cpu


REPLACEMENTS = (
    Replacement(
        _TRAINING, "initialize_megatron", _initialize_without_cuda, "refuses to start without CUDA"
    ),
    Replacement(
        _TRAINING,
        "set_jit_fusion_options",
        lambda _: lambda tp_size=None: None,
        "warms up fused CUDA kernels",
    ),
    Replacement(
        "megatron.training.initialize",
        "_compile_dependencies",
        lambda _: lambda: None,
        "compiles an index builder for GPT datasets, which are not used",
    ),
    Replacement(
        "megatron.training.arguments",
        "get_device_arch_version",
        lambda _: lambda: 10,
        "orders CUDA queues before Blackwell through CUDA_DEVICE_MAX_CONNECTIONS",
    ),
)


def install() -> None:
    """Prepare ``megatron.training`` in this process; calling it again does nothing.

    Raises:
        AttributeError: the installed Megatron lacks a replaced function.
    """
    for r in REPLACEMENTS:
        module = importlib.import_module(r.module)
        original = getattr(module, r.name)
        if not hasattr(original, "on_cpu"):
            replacement = r.make(original)
            replacement.on_cpu = True
            setattr(module, r.name, replacement)
