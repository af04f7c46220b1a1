"""Our own Triton kernels, each beside the eager code that it stands for.

A kernel is here where no library has one that fits. It runs on CUDA tensors if Triton can build it,
and otherwise the eager code does, which is the reference. Each says how many bytes it must move.

Kernels are operators of PyTorch, so that a rehearsal counts their bytes. For tests, Triton
interprets them on the CPU with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from mcore_qwen3vl.runtime.gpus import c_compiler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels, on the CPU."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels read and write; they compute in float32."""
EAGER = "MCORE_QWEN3VL_EAGER"
"""The variable of the environment by which a user takes the eager code, to compare or to go on."""


@cache
def why_eager() -> str | None:
    """Say why no kernel runs on this machine's GPUs; None if they do."""
    if os.environ.get(EAGER) == "1":
        return f"{EAGER}=1"
    if c_compiler() is None:
        return "there is no C compiler (CC, gcc, clang)"
    return None if find_spec("triton") else "the package triton is not installed"


def run_on(tensor: Tensor) -> bool:
    """Return whether kernels run on the device of `tensor`."""
    return (tensor.is_cuda or INTERPRETED) and why_eager() is None


def fits(values: Tensor) -> bool:
    """Return whether kernels run on the device of `values`, and take their dtype."""
    return values.dtype in DTYPES and run_on(values)
