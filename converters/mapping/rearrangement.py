"""How a Megatron-Core tensor is made of Hugging Face tensors, as data with an exact inverse.

Every mcore weight is a sequence of row blocks of Hugging Face tensors, sometimes transposed
(published experts), sometimes followed by zero rows (vocabulary padding). This description, as
data, gives the forward direction, the inverse and any slice from one place. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_qwen3vl.converters.storage.boxes import Box

Fetch = Callable[[int, Box], Tensor]
"""``fetch(source, box)`` returns a box of HF tensor number `source`."""


class RowBlock(NamedTuple):
    """Rows ``start:stop`` of HF tensor number `source`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rearrangement:
    """How one mcore tensor is made from one or more HF tensors.

    Attributes:
        blocks: the HF rows that fill the mcore rows, from the first row down. Each HF row is used
            once.
        padding: number of zero rows after the last block.
        transposed: whether the HF tensors are stored with their two axes swapped; `blocks` count
            rows after the swap.
    """

    blocks: tuple[RowBlock, ...]
    padding: int = 0
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Rows of the mcore tensor, padding included."""
        return sum(stop - start for _, start, stop in self.blocks) + self.padding

    def to_mcore(self, *hf: Tensor) -> Tensor:
        """Make the whole mcore tensor, contiguous, from whole HF tensors."""
        columns = hf[0].T.shape[1:] if self.transposed else hf[0].shape[1:]
        box = (slice(0, self.rows), *(slice(0, n) for n in columns))
        return self.take(lambda source, part: hf[source][part], box).contiguous()

    def to_hf(self, mcore: Tensor) -> tuple[Tensor, ...]:
        """Make the whole HF tensors from the whole mcore tensor; padding rows are dropped."""
        columns = tuple(slice(0, n) for n in mcore.shape[1:])
        sources = range(self.source_count)
        parts = (self.stream_back(n, mcore.__getitem__, columns, self.rows) for n in sources)
        return tuple(torch.cat(list(rows)).contiguous() for rows in parts)

    def take(self, fetch: Fetch, box: Box) -> Tensor:
        """Make `box` of the mcore tensor, fetching only the parts of HF tensors that it covers.

        The result may be a view of what `fetch` returned.
        """
        columns = box[1:]
        parts = []
        for source, start, stop in self.spans(box[0].start, box[0].stop):
            rows = slice(start, stop)
            part = fetch(source, (*columns, rows) if self.transposed else (rows, *columns))
            parts.append(part.T if self.transposed else part)
        if missing := box[0].stop - box[0].start - sum(len(p) for p in parts):
            # A box inside the padding fetches nothing; the first row gives dtype and width.
            like = parts[0] if parts else self.take(fetch, (slice(0, 1), *columns))
            parts.append(like.new_zeros(missing, *like.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stream(self, fetch: Fetch, columns: Box, max_rows: int) -> Iterator[Tensor]:
        """Yield the mcore tensor's rows in order, at most `max_rows` at a time, without a copy.

        Each chunk lies in one block, so what `fetch` returns is yielded as it is (transposed
        tensors as a transposed view).
        """
        row = 0
        # The padding is a block of its own here: only its number of rows counts.
        for _, start, stop in (*self.blocks, RowBlock(0, 0, self.padding)):
            last = row + stop - start
            while row < last:
                chunk = min(max_rows, last - row)
                yield self.take(fetch, (slice(row, row + chunk), *columns))
                row += chunk

    def stream_back(
        self, source: int, fetch: Callable[[Box], Tensor], columns: Box, max_rows: int
    ) -> Iterator[Tensor]:
        """Yield the rows of HF tensor number `source` in order, from boxes of the mcore tensor.

        A transposed tensor comes in one chunk, since each of its rows touches every mcore row.
        """
        if self.transposed:
            yield fetch((slice(0, self.rows), *columns)).T
            return
        row, wanted = 0, []
        for block in self.blocks:
            if block.source == source:
                wanted.append((block.start, row, row + block.stop - block.start))
            row += block.stop - block.start
        for _, start, stop in sorted(wanted):
            for first in range(start, stop, max_rows):
                yield fetch((slice(first, min(first + max_rows, stop)), *columns))

    def spans(self, start: int, stop: int) -> Iterator[RowBlock]:
        """Yield the parts of `blocks` that fill mcore rows ``start:stop``, in order, no padding."""
        for source, first, last, row in self.placed():
            # In rows of the HF tensor; its row `first` is mcore's `row`.
            low, high = max(first, first + start - row), min(last, first + stop - row)
            if low < high:
                yield RowBlock(source, low, high)

    def placed(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each block as (source, start, stop), with the first of its rows in mcore."""
        row = 0
        for source, start, stop in self.blocks:
            yield source, start, stop, row
            row += stop - start

    @property
    def in_order(self) -> bool:
        """Whether the rows of every HF tensor come in the order that they have there."""
        return sorted(self.blocks, key=lambda block: block.source) == sorted(self.blocks)

    @property
    def source_count(self) -> int:
        return 1 + max(block.source for block in self.blocks)


def identity(rows: int) -> Rearrangement:
    """Return the rearrangement of a tensor that is the same on both sides."""
    return Rearrangement((RowBlock(0, 0, rows),))


def transpose(rows: int) -> Rearrangement:
    """Return the transpose: mcore (rows, columns) from HF (columns, rows), published experts."""
    return Rearrangement((RowBlock(0, 0, rows),), transposed=True)


def concatenate(*rows: int) -> Rearrangement:
    """Concatenate HF tensors of these row counts, as mcore's gated linear does: gate, then up."""
    return Rearrangement(tuple(RowBlock(source, 0, n) for source, n in enumerate(rows)))


def pad_rows(rows: int, padded: int) -> Rearrangement:
    """Append zero rows up to `padded`, for an embedding whose vocabulary TP must divide."""
    return Rearrangement((RowBlock(0, 0, rows),), padding=padded - rows)


def qkv(heads: int, kv_heads: int, head_dim: int, *, gated: bool = False) -> Rearrangement:
    """Interleave query, key and value projections by KV head, as mcore's ``linear_qkv`` expects.

    Group g holds the ``heads / kv_heads`` query heads that share KV head g, then key head g, then
    value head g, so that TP cuts between groups while it divides the KV heads. If attention is
    `gated`, HF has the gate of each query head after it, and a group holds the gates of all its
    query heads after these.
    """
    share, d = heads // kv_heads, head_dim
    blocks: list[RowBlock] = []
    for g in range(kv_heads):
        queries = range(g * share, (g + 1) * share)
        if gated:
            blocks += [RowBlock(0, 2 * h * d, (2 * h + 1) * d) for h in queries]
            blocks += [RowBlock(0, (2 * h + 1) * d, (2 * h + 2) * d) for h in queries]
        else:
            blocks.append(RowBlock(0, queries.start * d, queries.stop * d))
        blocks += [RowBlock(1, g * d, (g + 1) * d), RowBlock(2, g * d, (g + 1) * d)]
    return Rearrangement(tuple(blocks))


def by_head(heads: int, *rows: int) -> Rearrangement:
    """Interleave tensors by head: `rows` rows of each for the first head, then for the second."""
    return Rearrangement(
        tuple(
            RowBlock(source, head * count, (head + 1) * count)
            for head in range(heads)
            for source, count in enumerate(rows)
        )
    )


def fused_qkv(heads: int, head_dim: int) -> Rearrangement:
    """Group one fused tensor, all queries, then all keys, then all values, as `qkv` does."""
    rows = heads * head_dim
    blocks = qkv(heads, heads, head_dim).blocks
    return Rearrangement(
        tuple(RowBlock(0, part * rows + start, part * rows + stop) for part, start, stop in blocks)
    )
