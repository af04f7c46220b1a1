"""Reduce gradients over the TP group in pieces of bounded size.

Some parameters are replicated on every TP rank, while each rank's gradient comes from a part of the
tokens: those of norms under SP, and those of the vision tower. mcore copies all these gradients
into one tensor before it reduces them. For the tower that takes 2.2 GB, at the moment of peak
memory of an MoE model under full recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

PIECE = 2**26  # values; 256 MB of float32
_MARKS = ("sequence_parallel", "average_gradients_across_tp_domain")  # of what is reduced
Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class _Piece:
    """Some parameters of a model chunk, with the attributes that mcore's function reads."""

    ddp_config: Any
    parameters: Sequence[Named]

    def named_parameters(self) -> Sequence[Named]:
        return self.parameters


def reduce_in_pieces(original: Any, model: Sequence[Any], *args: Any) -> None:
    """Replace ``_allreduce_non_tensor_model_parallel_grads``; the sums are the same."""
    for chunk in model:
        for parameters in _pieces(chunk.named_parameters()):
            original([_Piece(chunk.ddp_config, parameters)], *args)


def _pieces(parameters: Iterator[Named]) -> Iterator[list[Named]]:
    """Divide parameters, in order, into pieces; only those that are reduced have a size."""
    piece: list[Named] = []
    size = 0
    for name, parameter in parameters:
        reduced = any(getattr(parameter, mark, False) for mark in _MARKS)
        counts = parameter.numel() if reduced else 0
        if size and size + counts > PIECE:
            yield piece
            piece, size = [], 0
        piece.append((name, parameter))
        size += counts
    if piece:
        yield piece
