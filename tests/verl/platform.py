"""VERL on a CPU that says it is an accelerator."""

from __future__ import annotations

import torch


def as_accelerator() -> None:
    """Answer "cuda" from now on in this process, so that VERL moves what it thinks is on a device.

    Pinned memory, which needs a device, is replaced by ordinary memory.
    """
    from verl.plugin.platform import get_platform
    from verl.workers.engine import EngineRegistry

    from mcore_qwen3vl.verl.engine import Qwen3VLEngine

    type(get_platform()).device_name = "cuda"
    EngineRegistry.register("language_model", "megatron", device="cuda", vendor="none")(
        Qwen3VLEngine
    )
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
