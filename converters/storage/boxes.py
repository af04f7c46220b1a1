"""Boxes of a tensor: where two overlap, and whether many cover the whole exactly once."""

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
"""An index of the leading axes of a tensor: a slice keeps its axis, a number removes it."""


@dataclass(frozen=True)
class Extent:
    """A box by its first corner and its size."""

    offsets: Shape
    sizes: Shape


@dataclass(frozen=True)
class Overlap:
    """The overlap of a stored box and a wanted one, in the coordinates of each."""

    stored: Box
    wanted: Box


def with_explicit_bounds(box: Selection, shape: Shape) -> tuple[Any, ...]:
    """Return `box` with a slice for every axis, and explicit bounds in every slice."""
    full = (*box, *(slice(None) for _ in shape[len(box) :]))
    return tuple(
        slice(*place.indices(size)) if isinstance(place, slice) else place
        for place, size in zip(full, shape, strict=True)
    )


def overlap(wanted: Extent, stored: Extent) -> Overlap | None:
    """Return the overlap of the two boxes, or None."""
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


def boxes_of_flat_range(shape: Shape, start: int, stop: int) -> Iterator[Extent]:
    """Yield the boxes that make up elements `start` to `stop` of a flattened row-major tensor.

    In order: the boxes of a partial first row, one box of all whole rows, and the boxes of a
    partial last row.
    """
    if start >= stop:
        return
    if not shape:
        yield Extent((), ())
        return
    row = prod(shape[1:])
    (first, before), (last, after) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _boxes_in_row(shape, first, before, after)
        return
    if before:
        yield from _boxes_in_row(shape, first, before, row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Extent((first, *zeros), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, 0, after)


def _boxes_in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Extent]:
    """Yield the boxes of elements `start` to `stop` of one row of the first axis."""
    for box in boxes_of_flat_range(shape[1:], start, stop):
        yield Extent((row, *box.offsets), (1, *box.sizes))


def are_exact_cover(boxes: Sequence[Extent], shape: Shape) -> bool:
    """Return whether `boxes`, which lie inside `shape`, cover every element exactly once."""
    return sum(prod(box.sizes) for box in boxes) == prod(shape) and _are_disjoint(boxes, 0)


def _are_disjoint(boxes: Sequence[Extent], axis: int) -> bool:
    """Return whether no two boxes overlap from `axis` on.

    Boxes are separated along one axis after another, so that a grid needs no pairwise comparison.
    """
    if len(boxes) < 2:
        return True
    if axis == len(boxes[0].sizes):
        return not any(overlap(a, b) for a, b in combinations(boxes, 2))
    return all(_are_disjoint(group, axis + 1) for group in _groups_apart(boxes, axis))


def _groups_apart(boxes: Sequence[Extent], axis: int) -> Iterator[list[Extent]]:
    """Yield the boxes in groups that do not overlap along `axis`."""
    group: list[Extent] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if group and box.offsets[axis] >= reach:
            yield group
            group = []
        group.append(box)
        reach = max(reach, box.offsets[axis] + box.sizes[axis])
    yield group
