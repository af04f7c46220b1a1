"""The choice of samples that share a sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best-fit decreasing: the longest item first, each into the bin that it fills best.

    It needs at most 11/9 of the fewest bins possible, plus one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

    Args:
        lengths: lengths of the items, each from 1 to `capacity`.
        capacity: capacity of a bin.

    Returns:
        The items' indices, bin by bin. Items within a bin, and bins by their first item, are in the
        order of `lengths`, so that packing does not sort training by length.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            bins.append([item])
            room, index = capacity, len(bins) - 1
        else:
            room, index = rooms.pop(place)
            bins[index].append(item)
        left = (room - length, index)
        rooms.insert(bisect_left(rooms, left), left)
    return sorted(sorted(items) for items in bins)
