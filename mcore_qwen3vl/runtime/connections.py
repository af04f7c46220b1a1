"""The number of GPU queues that a process uses, which must be set before CUDA starts."""

from __future__ import annotations

import ctypes
import os

BLACKWELL = 10
"""Major compute capability."""


def order_transfers() -> None:
    """Set one queue on GPUs before Blackwell, unless the environment sets a number.

    Megatron needs a single queue there to order its overlapped transfers. Blackwell does not need
    it, and is slow with it. A GPU that is not known counts as older.
    """
    major = _compute_capability()
    if major is None or major < BLACKWELL:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _compute_capability() -> int | None:
    """Return the first GPU's major compute capability; None: not known.

    It asks the driver's management library, because asking CUDA would start it.
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
