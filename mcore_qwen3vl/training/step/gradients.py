"""Gradients that mcore adds up over the TP group, in pieces of bounded size.

Parameters whole on every TP rank, norms' under SP and the vision tower's, have gradients of a part
of the tokens on each. mcore copies all of them into one tensor before it reduces them: 2.2 GB for
the tower, at a moment when MoE models under full recompute hold as much as they ever do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

PIECE = 2**26  # values; 256 MB of float32
Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class _Piece:
    """Some parameters of a model chunk, as far as mcore's function looks at one."""

    ddp_config: Any
    parameters: Sequence[Named]

    def named_parameters(self) -> Sequence[Named]:
        return self.parameters


def reduce_in_pieces(original: Any, model: Sequence[Any], *args: Any) -> None:
    """In place of ``_allreduce_non_tensor_model_parallel_grads``; the sums are the same."""
    for chunk in model:
        for parameters in _pieces(chunk.named_parameters()):
            original([_Piece(chunk.ddp_config, parameters)], *args)


def _pieces(parameters: Iterator[Named]) -> Iterator[list[Named]]:
    """In order, so that all ranks make the same; what is reduced alone counts towards the size."""
    piece: list[Named] = []
    size = 0
    for name, parameter in parameters:
        counts = parameter.numel() if _is_reduced(parameter) else 0
        if size and size + counts > PIECE:
            yield piece
            piece, size = [], 0
        piece.append((name, parameter))
        size += counts
    if piece:
        yield piece


def _is_reduced(parameter: nn.Parameter) -> bool:
    marks = ("sequence_parallel", "average_gradients_across_tp_domain")
    return any(getattr(parameter, mark, False) for mark in marks)
