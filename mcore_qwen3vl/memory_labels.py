"""Names of what holds a GPU's memory, declared beside the code that allocates it.

A module says with :func:`label_module` what its tensors are, and :func:`memory_label` says it of
one of its functions. A declaration costs nothing in a run: it notes lines of source, and leaves the
function as it is. So ``torch.compile`` sees none of it, and it holds wherever the lines run: in the
forward pass, in recomputation and in the backward pass. :func:`label_at` finds the label of a line
in a recorded stack, as a rehearsal does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, get_args

MemoryLabel = Literal[
    "attention",
    "batch",
    "embedding",
    "experts and router",
    "gated delta nets",
    "logits and loss",
    "MLP",
    "model, other",
    "norms",
    "optimizer, temporary",
    "residual stream",
    "vision tower",
]
"""What the code of this project allocates; it is ``model, other`` where a module says nothing."""

LABELS: tuple[MemoryLabel, ...] = get_args(MemoryLabel)


@dataclass
class _Declared:
    """The declarations of one file of source."""

    label: MemoryLabel | None = "model, other"
    functions: list[tuple[range, MemoryLabel]] = field(default_factory=list)  # by their lines


_files: dict[str, _Declared] = {}


def label_module(file: str, label: MemoryLabel | None) -> None:
    """Label what the functions of a module allocate.

    Args:
        file: the module's ``__file__``.
        label: None if they allocate for their callers, whose label counts then.
    """
    _of(file).label = label


def memory_label[Function: Callable[..., Any]](
    label: MemoryLabel,
) -> Callable[[Function], Function]:
    """Return a decorator that labels what a function allocates, before its module's label."""

    def declare(function: Function) -> Function:
        code = function.__code__
        lines = list(_lines_of(code))
        _of(code.co_filename).functions.append((range(min(lines), max(lines) + 1), label))
        return function

    return declare


def label_at(file: str, line: int) -> MemoryLabel | None:
    """Return the label of what a line of source allocates; None if it does so for its caller.

    `file` is the module's ``__file__``, which recorded stacks have too.
    """
    declared = _of(file)
    of_function = (label for lines, label in declared.functions if line in lines)
    return next(of_function, declared.label)


def _of(file: str) -> _Declared:
    return _files.setdefault(file, _Declared())


def _lines_of(code: CodeType) -> Iterator[int]:
    """Yield the lines of a function, and of the functions that it defines."""
    yield code.co_firstlineno
    yield from (number for _, _, number in code.co_lines() if number is not None)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines_of(constant)
