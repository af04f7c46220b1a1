"""Boxes of a tensor: where two meet, and whether many fill the whole once each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

Shape = tuple[int, ...]

Box = tuple[slice, ...]
"""One slice with explicit start and stop per axis."""

Selection = tuple[int | slice, ...]
"""What indexes the leading axes of a tensor: a slice for each; a number takes its axis away."""


@dataclass(frozen=True)
class Extent:
    """A box by its first corner and its size."""

    offsets: Shape
    sizes: Shape


@dataclass(frozen=True)
class Overlap:
    """What a stored box and a wanted one share, seen from each."""

    stored: Box
    wanted: Box


def explicit(box: Selection, shape: Shape) -> tuple[Any, ...]:
    """`box` with a slice for every axis that it leaves out, and no bound left open."""
    whole = (*box, *(slice(None) for _ in shape[len(box) :]))
    return tuple(
        slice(*place.indices(size)) if isinstance(place, slice) else place
        for place, size in zip(whole, shape, strict=True)
    )


def overlap(wanted: Extent, stored: Extent) -> Overlap | None:
    """Where the two meet, or None."""
    of_stored, of_wanted = [], []
    for at, n, first, count in zip(
        wanted.offsets, wanted.sizes, stored.offsets, stored.sizes, strict=True
    ):
        low, high = max(at, first), min(at + n, first + count)
        if low >= high:
            return None
        of_stored.append(slice(low - first, high - first))
        of_wanted.append(slice(low - at, high - at))
    return Overlap(tuple(of_stored), tuple(of_wanted))


def flat_range(shape: Shape, start: int, stop: int) -> Iterator[Extent]:
    """The boxes that elements `start` to `stop` of a flattened row-major tensor are made of.

    Args:
        shape: of the tensor.
        start: the first element.
        stop: the first one after them.

    Yields:
        In order: rows that are whole as one box, and before and after it those of a part of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Extent((), ())
        return
    row = prod(shape[1:])
    (first, before), (last, after) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _of_row(shape, first, before, after)
        return
    if before:
        yield from _of_row(shape, first, before, row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Extent((first, *zeros), (last - first, *shape[1:]))
    yield from _of_row(shape, last, 0, after)


def _of_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Extent]:
    for box in flat_range(shape[1:], start, stop):
        yield Extent((row, *box.offsets), (1, *box.sizes))


def fill(boxes: Sequence[Extent], shape: Shape) -> bool:
    """Whether `boxes`, which lie inside `shape`, cover every element exactly once."""
    return sum(prod(box.sizes) for box in boxes) == prod(shape) and _disjoint(boxes, 0)


def _disjoint(boxes: Sequence[Extent], axis: int) -> bool:
    """Cuts between boxes along one axis after the other; grids fall apart without comparing."""
    if len(boxes) < 2:
        return True
    if axis == len(boxes[0].sizes):
        return not any(overlap(a, b) for a, b in combinations(boxes, 2))
    return all(_disjoint(group, axis + 1) for group in _groups(boxes, axis))


def _groups(boxes: Sequence[Extent], axis: int) -> Iterator[list[Extent]]:
    """The boxes in groups that do not meet along `axis`."""
    group: list[Extent] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if group and box.offsets[axis] >= reach:
            yield group
            group = []
        group.append(box)
        reach = max(reach, box.offsets[axis] + box.sizes[axis])
    yield group
