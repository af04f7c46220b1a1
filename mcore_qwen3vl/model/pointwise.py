"""Pointwise regions, which are compiled into one kernel each after :func:`compile_pointwise`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

VARIANTS = 32
"""Limit of compiled variants per function; beyond it the function runs uncompiled.

Variants differ in the inputs' rank, layout and dtype, and in which sizes are one; all other sizes
share one variant.
"""


class Pointwise[**P, R]:
    """A decorator: the function runs as it is written, or compiled after :func:`compile_pointwise`.

    The function is called inside autograd Functions, so on tensors without gradients. It must not
    branch on their values or sizes.
    """

    everywhere = False
    """Whether all decorated functions of this process are compiled."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._compiled: Callable[..., R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not Pointwise.everywhere:
            return self._function(*args, **kwargs)
        if self._compiled is None:
            compile_function = inspect.unwrap(torch.compile)  # the CPU backend wraps it
            self._compiled = compile_function(self._function, dynamic=True)
        # Requiring a gradient or not would make another variant.
        values = (value.detach() if isinstance(value, Tensor) else value for value in args)
        return self._compiled(*values, **kwargs)


def compile_pointwise() -> None:
    """Compile all decorated functions from now on, until the process ends."""
    Pointwise.everywhere = True
    config: Any = torch._dynamo.config
    config.disable = False  # set on the simulated GPU, and where there is no C compiler
    config.recompile_limit = max(config.recompile_limit, VARIANTS)
