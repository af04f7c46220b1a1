"""What must be set before CUDA starts: the number of GPU queues, and whether functions compile."""

from __future__ import annotations

import ctypes
import os
import shutil

BLACKWELL = 10
"""Major compute capability."""


def order_transfers(*, several_queues: bool = False) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS=1`` on GPUs before Blackwell, unless it is set already.

    Before Blackwell, Megatron's overlapped transfers stay in order only in a single hardware queue.
    Blackwell does not need this, and is slow with it. An unknown GPU counts as older.

    Args:
        several_queues: set it to 32 instead, the most. In one queue, an exchange that waits for its
            event holds up all kernels launched after it, also those of another stream.
    """
    major = _compute_capability()
    if major is None or major < BLACKWELL:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32" if several_queues else "1")


def _compute_capability() -> int | None:
    """Return the first GPU's major compute capability; None: not known.

    NVML is asked, because a question to the CUDA runtime would start CUDA.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = library.nvmlDeviceGetHandleByIndex_v2(
        0, ctypes.byref(device)
    ) or library.nvmlDeviceGetCudaComputeCapability(
        device, ctypes.byref(major), ctypes.byref(minor)
    )
    library.nvmlShutdown()
    return None if failed else major.value


def c_compiler() -> str | None:
    """Return the C compiler with which Triton builds its kernels; None: there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compile_where_possible() -> None:
    """Disable ``torch.compile``, which Megatron uses for fusions, where there is no compiler.

    Fused functions then run one kernel after another. Otherwise the warm-up before training would
    fail.
    """
    if c_compiler() is None:
        import torch

        config: object = torch._dynamo.config
        config.disable = True  # type: ignore[attr-defined]
