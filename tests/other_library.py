"""Matrix products as another library may sum them: ``pytest -p tests.other_library``.

Libraries choose a routine by the operands' shapes, strides and alignment, and each routine has its
own order of sums. Here half of these combinations sum in reverse order on the CPU, so that tests
meet a library that chooses where the one in use does not. The same call gives the same bits.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any

from torch import Tensor
from torch.library import Library, get_kernel

ALIGNMENT = 64
"""Bytes of a cache line and of the widest registers, by which libraries choose."""

SUMMED = {"mm": (1, 0), "bmm": (2, 1), "addmm": (1, 0), "baddbmm": (2, 1)}
"""By operator: the summed axis of the left factor and of the right one."""


def _reversing(name: str) -> Any:
    kernel = get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **options: Any) -> Tensor:
        *added, left, right = args
        traits = [(t.shape, t.stride(), t.data_ptr() % ALIGNMENT) for t in (left, right)]
        if zlib.crc32(repr(traits).encode()) % 2:
            left, right = (
                t.flip(axis) for t, axis in zip((left, right), SUMMED[name], strict=True)
            )
        return kernel.call_boxed(keys, *added, left, right, **options)

    return product


LIBRARY = Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
    for replaced in {name: _reversing(name) for name in SUMMED}.items():
        LIBRARY.impl(*replaced, "CPU", with_keyset=True)
