"""Pointwise regions as one kernel each, through ``torch.compile``, once that is switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VARIANTS = 32
"""Most that are compiled of one function: its inputs differ in rank, layout, dtype, sizes of one;
other sizes are all the same. Then it runs as it is written."""


class Pointwise[**P, R]:
    """A decorator: runs the function as it is written, or compiled after :func:`switch_on`.

    The function is called within autograd's own functions: with values, of any size, on which it
    does not branch.
    """

    everywhere = False
    """Whether all of them are compiled, in this process."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._compiled: Callable[..., R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not Pointwise.everywhere:
            return self._function(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=True)
        return self._compiled(*map(_value, args), **kwargs)


def switch_on() -> None:
    """From now on, until the process ends."""
    Pointwise.everywhere = True
    config: Any = torch._dynamo.config
    config.disable = False  # the CPU backend sets it, against Megatron's functions
    config.recompile_limit = max(config.recompile_limit, VARIANTS)


def _value(argument: object) -> object:
    """Whether it needs a gradient would make another variant."""
    return argument.detach() if isinstance(argument, Tensor) else argument
