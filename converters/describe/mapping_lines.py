"""The mapping in a readable form: one line for rows that are the same in all layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.transforms import Rearrangement
from mcore_qwen3vl.converters.storage.boxes import Shape

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class MappingLine:
    """Rows of the mapping that differ only in the layer, block or expert.

    Attributes:
        hf: names of the Hugging Face tensors that make one mcore piece, in the order of the
            transform; ``layers.{0..35}`` stands for each of these layers.
        hf_shapes: shape of each whole HF tensor (fused experts with their first axis).
        mcore: sharded checkpoint key of the mcore tensor, written in the same way.
        shape: shape of one piece: one layer, or one expert.
        stacked: sizes of the axes on which the pieces are stacked before `shape`: (layers,),
            (experts,), (layers, experts) or ().
        transform: how the tensors in `hf` become the piece, in a few words.
        tp_axis: axis of `shape` that tensor parallelism cuts; None if every rank holds the piece.
        tp_parts: number of equal parts along `tp_axis` that are each cut (2 for gate and up).
        cut_by: ``TP``, or ``ETP`` for an expert; None where `tp_axis` is None.
    """

    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    mcore: str
    shape: Shape
    stacked: Shape
    transform: str
    tp_axis: int | None
    tp_parts: int
    cut_by: str | None
    rows: int


def mapping_lines(rows: Iterable[Row]) -> list[MappingLine]:
    """Fold the rows of :func:`mcore_qwen3vl.converters.mapping.table.table`, in order."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        names = (row.key, *(source.name for source in row.sources))
        shapes = (row.global_shape, *(source.shape for source in row.sources))
        alike = (*(_NUMBER.sub("#", name) for name in names), *shapes, row.rearrangement)
        groups.setdefault((*alike, row.tp_axis, row.tp_parts), []).append(row)
    return [_line(group) for group in groups.values()]


def describe(rearrangement: Rearrangement) -> str:
    """Return the name of the transform, in a few words."""
    if rearrangement.transposed:
        return "transpose"
    if rearrangement.padding:
        return f"append {rearrangement.padding} zero rows"
    if rearrangement.source_count == 1:
        return "identity"
    if len(rearrangement.blocks) == rearrangement.source_count:
        return "concatenate rows"
    groups = len(rearrangement.blocks) // rearrangement.source_count
    return f"interleave rows in {groups} groups"


def _line(group: Sequence[Row]) -> MappingLine:
    first = group[0]
    sources = range(len(first.sources))
    return MappingLine(
        hf=tuple(_folded([row.sources[i].name for row in group]) for i in sources),
        hf_shapes=tuple(source.shape for source in first.sources),
        mcore=_folded([row.key for row in group]),
        shape=first.shape,
        stacked=first.global_shape[: len(first.offset)],
        transform=describe(first.rearrangement),
        tp_axis=first.tp_axis,
        tp_parts=first.tp_parts,
        cut_by=None if first.tp_axis is None else "ETP" if ".experts." in first.key else "TP",
        rows=len(group),
    )


def _folded(names: Sequence[str]) -> str:
    """Return one name for all `names`, with the numbers in braces if there are several."""
    numbers = sorted({int(match[0]) for name in names if (match := _NUMBER.search(name))})
    if len(numbers) < 2:
        return names[0]
    return _NUMBER.sub(f"{{{_ranges(numbers)}}}", names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0..3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
