"""A row of the table: one piece of a Megatron-Core tensor and the Hugging Face tensors in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.transforms import Rearrangement, identity
from mcore_qwen3vl.converters.storage.boxes import Box, Selection, Shape

LAYERS = "decoder.layers."
"""Prefix of the keys of all decoder layers."""

CHUNK_BYTES = 16 * 2**20
"""Tensors move in pieces of this size, except a transposed expert, which moves whole."""


@dataclass(frozen=True)
class SourceTensor:
    """An HF tensor of this shape, or slice `index` of its first axis (an expert of fused ones)."""

    name: str
    shape: Shape
    index: int | None = None

    @property
    def piece_shape(self) -> Shape:
        return self.shape if self.index is None else self.shape[1:]

    @property
    def label(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    def place(self, box: Selection) -> Selection:
        """Return where a box of the piece lies in the whole HF tensor."""
        return box if self.index is None else (self.index, *box)


@dataclass(frozen=True)
class Row:
    """One piece of one mcore tensor and the HF tensors it is made of.

    Attributes:
        key: mcore sharded checkpoint key, the same for all pieces of a tensor.
        global_shape: shape of the whole mcore tensor, stacked axes first.
        offset: position of this piece on the stacked axes: (), (layer,), (expert,) or
            (layer, expert).
        sources: the HF tensors, in the order in which `rearrangement` numbers them.
        rearrangement: how the HF tensors become the piece.
        tp_axis: the axis of the piece that tensor parallelism cuts (ETP for an expert), or None
            if every rank holds the whole piece.
        tp_parts: number of equal parts along `tp_axis` that are each cut (2 for gate and up).
    """

    key: str
    global_shape: Shape
    offset: Shape
    sources: tuple[SourceTensor, ...]
    rearrangement: Rearrangement
    tp_axis: int | None = None
    tp_parts: int = 1

    @property
    def shape(self) -> Shape:
        """Shape of this piece, without the stacked axes."""
        return self.global_shape[len(self.offset) :]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The decoder layer that the piece belongs to; None outside the decoder's layers."""
        return next(iter(self._layer_and_expert), None)

    @property
    def expert(self) -> int | None:
        """The expert that the piece belongs to; None outside the experts."""
        return next(iter(self._layer_and_expert[1:]), None)

    @property
    def _layer_and_expert(self) -> Shape:
        if not self.key.startswith(LAYERS):
            return ()
        own = self.key.split(".", 3)[2]  # a layer's number, where layers are not stacked
        return (int(own), *self.offset) if own.isdigit() else self.offset

    def to_mcore(self, *hf: Tensor) -> Tensor:
        """Make the piece, of shape `shape`, from HF pieces (each of its source's `piece_shape`)."""
        return self.rearrangement.to_mcore(*hf)

    def to_hf(self, mcore: Tensor) -> tuple[Tensor, ...]:
        """Make the HF pieces, one per source, from the whole piece; inverse of `to_mcore`."""
        return self.rearrangement.to_hf(mcore)

    def take(self, fetch: Callable[[str, Selection], Tensor], box: Box) -> Tensor:
        """Make `box` of the piece; ``fetch(name, box)`` returns that box of a whole HF tensor.

        Only what `box` covers is fetched.
        """

        def piece(number: int, part: Box) -> Tensor:
            return fetch(self.sources[number].name, self.sources[number].place(part))

        return self.rearrangement.take(piece, box)


def max_rows(row: Row, dtype: torch.dtype) -> int:
    """Return the most rows that one chunk of `row` may have."""
    width = row.numel // row.shape[0] * dtype.itemsize
    return max(CHUNK_BYTES // max(width, 1), 1)


def same(key: str, name: str, shape: Shape) -> Row:
    """Return the row of a tensor that is the same on both sides and not stacked."""
    return Row(key, shape, (), (SourceTensor(name, shape),), identity(shape[0]))
