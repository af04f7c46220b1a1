"""VERL on the CPU with gloo: a platform, engines registered for it, float32."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from mcore_qwen3vl.runtime import cpu

os.environ["VERL_PLATFORM"] = "cpu-gloo"


class _Device(types.ModuleType):
    """``torch.cuda`` of the CPU backend, with replacements for what raises without a device."""

    mem_get_info = staticmethod(lambda device=None: (1, 1))
    empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda device=None: "CPU")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_DEVICE = _Device("cpu_device")


def install() -> None:
    """Register platform and engines. Call it once, before anything else imports VERL."""
    assert cpu.installed()
    from verl.plugin.platform import PlatformRegistry
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class CpuPlatform(PlatformCUDA):
        """A platform that answers "cpu" when VERL asks for the device."""

        device_name = "cpu"
        vendor_name = "none"
        device_module = _DEVICE

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def communication_backend_name(self) -> str:
            return "gloo"

        def empty_cache(self) -> None: ...

    PlatformRegistry.register(platform="cpu-gloo")(CpuPlatform)
    from verl.workers.engine import EngineRegistry

    from mcore_qwen3vl.verl.engine import Qwen3VLEngine, Qwen3VLValueEngine

    for kind, engine in (("language_model", Qwen3VLEngine), ("value_model", Qwen3VLValueEngine)):
        EngineRegistry.register(kind, "megatron", device="cpu")(engine)


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
