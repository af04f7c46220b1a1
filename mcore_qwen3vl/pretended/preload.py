"""Starting a program with the device preloaded, since PyTorch finds CUDA when it is loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mcore_qwen3vl.pretended.build import libraries

Routing = Literal["uniform", "skewed"]
"""How tokens are spread over experts, see :mod:`.integers`."""


@dataclass(frozen=True)
class Settings:
    """The properties of the device."""

    memory_gib: float = 80.0
    """Device memory in GiB."""
    context_mib: float = 600.0
    """Device memory that the context and loaded kernels take, in MiB."""
    capability: int = 90
    """Compute capability, 10 x major + minor."""
    late_events: bool = False
    """Whether events complete only when the host waits for them. The peak is then an upper bound of
    what tensors in use by several streams take; if events complete at once, it is the least."""

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables with which a program finds this device.

        Raises:
            Unavailable: see :func:`.build.libraries`.
        """
        driver, *others = libraries()
        words = [*map(str, (driver, *others)), *inherited.get("LD_PRELOAD", "").split(":")]
        return {
            "LD_PRELOAD": ":".join(dict.fromkeys(filter(None, words))),
            "PRETENDED_GIB": str(self.memory_gib),
            "PRETENDED_CONTEXT_MIB": str(self.context_mib),
            "PRETENDED_CAPABILITY": str(self.capability),
            "PRETENDED_LATE": str(int(self.late_events)),
            # Compiled code would need Triton and ptxas, and would do nothing.
            "TORCHDYNAMO_DISABLE": inherited.get("TORCHDYNAMO_DISABLE", "1"),
            "TORCH_DISABLE_NATIVE_JIT": inherited.get("TORCH_DISABLE_NATIVE_JIT", "1"),
            "CUDA_VISIBLE_DEVICES": "0",
            # Transformer Engine's permutations are Triton kernels, whose launcher links the driver.
            "TRITON_LIBCUDA_PATH": str(driver.parent),
            # Asking whether there is a device must not make a context, see Workbench.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }


def preloaded() -> bool:
    """Return whether this process runs on the pretended device."""
    return "pretended-device" in os.environ.get("LD_PRELOAD", "") and hasattr(
        ctypes.CDLL(None), "pretended_counters"
    )


def start_again(settings: Settings | None = None) -> None:
    """Restart this process on the pretended device, unless it runs on it already.

    Call it first in a program, before anything has side effects.

    Raises:
        Unavailable: see :func:`.build.libraries`.
    """
    if not preloaded():
        os.environ |= (settings or Settings()).environment()
        os.execv(sys.executable, sys.orig_argv)
