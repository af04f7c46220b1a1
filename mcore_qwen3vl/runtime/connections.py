"""How many queues of a GPU a process takes, which must be said before CUDA starts."""

from __future__ import annotations

import ctypes
import os

BLACKWELL = 10
"""Major compute capability."""


def order_transfers() -> None:
    """Before Blackwell one queue, unless the environment says otherwise.

    Megatron orders its overlapped transfers by it there. Blackwell does without, and is slow with
    one.
    """
    major = _compute_capability()
    if major is None or major < BLACKWELL:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _compute_capability() -> int | None:
    """The first GPU's, by the driver's management library, since CUDA would start to answer."""
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
