"""GPUs: what must be set before CUDA starts, and the kinds that are known.

Of a kind we know the speed, and the memory that PyTorch does not get.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

GIB = 1 << 30

HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; its speed is from NVIDIA's data sheets."""

    name: str
    memory_gib: float  # as torch.cuda.get_device_properties reports, without ECC and firmware
    capability: int  # compute capability, 10 x major + minor
    tflops: float  # dense bf16 peak in TFLOP/s
    nvlink_gb_per_s: float  # bandwidth in one direction, to all GPUs of the node together
    memory_tb_per_s: float  # bandwidth of the GPU's own memory

    @property
    def model(self) -> str:
        """The name without the memory's size, as it is a part of CUDA's name of the device."""
        return self.name.partition("-")[0]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", 39.4, 80, 312, 300, 1.555),
        Gpu("a100-80gb", 79.1, 80, 312, 300, 2.039),
        Gpu("h100-80gb", 79.1, 90, 989, 450, 3.35),
        Gpu("h200-141gb", 139.7, 90, 989, 450, 4.8),
        Gpu("b200-180gb", 178.3, 100, 2250, 900, 8.0),
    )
}

CONTEXT_GIB = 0.75
"""CUDA's context and the loaded kernels, on an H100 with CUDA 13.0 (docs/measurements/h100.md)."""
NCCL_GROUP_GIB = 0.4
"""What NCCL takes for a process group: 2.4 GiB for six of one rank and 3.2 for eight, there."""
NCCL_ALL_TO_ALL_GIB = 3.1
"""NCCL's buffers for a group with all-to-all (3.1 GiB for 8 H100 in nccl issue 1685)."""


def find_gpu(name: str) -> Gpu:
    """Return the only GPU whose name begins with `name`; BadInput if there is none, or several."""
    matches = [gpu for key, gpu in GPUS.items() if key.startswith(name.lower())]
    if len(matches) != 1:
        raise BadInput(
            f"--gpu {name} is {'more than one GPU' if matches else 'not known'}: use one of "
            f"{', '.join(GPUS)}, with --memory-gib for another size."
        )
    return matches[0]


def count_nccl_groups(layout: Layout, *, moe: bool) -> int:
    """Return how many process groups training hands something to through NCCL, but for EP's.

    Rehearsals list them: all ranks, the optimizer's, TP with PP, PP, DP with CP, and TP with CP, in
    whose place DP is used where there is neither; TP and CP; with experts, TP with DP.
    """
    alone = layout.tp * layout.cp == 1
    return 6 + (layout.tp > 1) + (layout.cp > 1) + moe * (1 + alone)


def allowance_gib(layout: Layout, *, moe: bool) -> float:
    """Return the GiB that context and NCCL take of each GPU, beside PyTorch's allocator.

    NCCL's are those of :func:`count_nccl_groups`, and of an all-to-all for EP. On one GPU they were
    measured; what groups of several ranks take is assumed.
    """
    exchange = NCCL_ALL_TO_ALL_GIB if layout.ep > 1 else 0.0
    return round(CONTEXT_GIB + count_nccl_groups(layout, moe=moe) * NCCL_GROUP_GIB + exchange, 2)


def order_transfers(*, several_queues: bool = False) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS=1`` on GPUs before Blackwell, unless it is set already.

    Before Blackwell, Megatron's overlapped transfers stay in order only in a single hardware queue.
    Blackwell does not need this, and is slow with it. An unknown GPU counts as older. With
    `several_queues` it is set to 32 instead, the most: in one queue, an exchange that waits for its
    event holds up all kernels launched after it, also on another stream.
    """
    major = compute_capability()
    if major is None or major < BLACKWELL:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32" if several_queues else "1")


def compute_capability() -> int | None:
    """Return the first GPU's major compute capability; None: not known."""
    # NVML is asked, because a question to the CUDA runtime would start CUDA.
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


def disable_compile_without_compiler() -> None:
    """Disable ``torch.compile``, which Megatron uses for fusions, where there is no compiler."""
    # Otherwise the warm-up before training would fail. Fused functions run kernel by kernel.
    if c_compiler() is None:
        import torch

        config: object = torch._dynamo.config
        config.disable = True  # type: ignore[attr-defined]
