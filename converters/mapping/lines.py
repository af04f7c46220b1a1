"""The mapping in few lines: rows that differ only in numbers are one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_qwen3vl.converters.mapping.rearrangement import Rearrangement
from mcore_qwen3vl.converters.mapping.table import Row, SourceTensor
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
        stacked: sizes of the axes before `shape`: (layers,), (experts,), (layers, experts) or ().
        tp_axis, tp_parts: see `table.Row`.
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
        parts = (source.piece for source in row.sources if source.index is None)
        alike = (*(_NUMBER.sub("#", n) for n in names), *shapes, *parts, row.rearrangement)
        groups.setdefault((*alike, row.tp_axis, row.tp_parts), []).append(row)
    lines = []
    for group in groups.values():
        first = group[0]
        sources = zip(*(map(_source_name, row.sources) for row in group), strict=True)
        cut_by = "ETP" if ".experts." in first.key else "TP"
        line = MappingLine(
            hf=tuple(map(_fold_names, sources)),
            hf_shapes=tuple(source.written_shape for source in first.sources),
            mcore=_fold_names([row.key for row in group]),
            shape=first.shape,
            stacked=first.global_shape[: len(first.offset)],
            transform=transform_name(first.rearrangement),
            tp_axis=first.tp_axis,
            tp_parts=first.tp_parts,
            cut_by=None if first.tp_axis is None else cut_by,
            rows=len(group),
        )
        lines.append(line)
    return lines


def transform_name(rearrangement: Rearrangement) -> str:
    """Return the name of the transform, in a few words."""
    if rearrangement.transposed:
        return "transpose"
    if rearrangement.padding:
        return f"append {rearrangement.padding} zero rows"
    if rearrangement.source_count == 1:
        return "identity"
    if len(rearrangement.blocks) == rearrangement.source_count:
        return "concatenate rows"
    last = rearrangement.source_count - 1  # each group has one block of it
    groups = sum(block.source == last for block in rearrangement.blocks)
    return f"interleave rows in {groups} groups"


def _source_name(source: SourceTensor) -> str:
    """Return the name, with the rows if the piece is a part of the tensor of that name."""
    if source.rows is None or source.alone:
        return source.name
    return f"{source.name}[{source.rows[0]}:{source.rows[1]}]"


def _fold_names(names: Sequence[str]) -> str:
    """Return one name for all `names`, with the several numbers of a place in braces."""
    places = [set(map(int, place)) for place in zip(*map(_NUMBER.findall, names), strict=True)]
    shown = iter(f"{{{_ranges(sorted(n))}}}" if len(n) > 1 else str(*n) for n in places)
    return _NUMBER.sub(lambda _: next(shown), names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0..3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
