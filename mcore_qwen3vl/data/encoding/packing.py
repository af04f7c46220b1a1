"""Which records share a pack: best-fit decreasing, epoch by epoch.

No sample is packed before all of the epoch before it are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.energon.wrappers import PackingDataset
from megatron.energon.wrappers.base import get_sample_restore_key


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best-fit decreasing: the longest item first, each into the bin that it fills best.

    It needs at most 11/9 of the fewest bins possible, plus one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

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
        insort(rooms, (room - length, index))
    return sorted(sorted(items) for items in bins)


_KEPT = (
    *("dataset", "buffer_size", "worker_config", "final_packer", "final_packer_stateless"),
    *("sample_encoder", "sample_encoder_stateless", "sample_encoder_failure_tolerance"),
    *("pre_packer_failure_tolerance", "final_packer_failure_tolerance"),
)
"""What it takes over from energon's own."""

EpochOf = Callable[[Any], int]
"""``(restore key) -> the sample's epoch``."""


class EpochPacking(PackingDataset):
    """A packing whose buffer holds one epoch, and at most the first sample of the next."""

    _savable_fields = (*PackingDataset._savable_fields, "buffer_size", "_size")

    def __init__(
        self,
        packing: PackingDataset,
        epoch_of: EpochOf,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
    ) -> None:
        """Replace energon's packing; each buffer of one epoch's samples goes to `pre_packer`."""
        self._epoch_of, self._pack_epoch = epoch_of, pre_packer
        self._size = packing.buffer_size  # of a full buffer
        kept = {name: getattr(packing, name) for name in _KEPT}
        super().__init__(pre_packer=self._pack_first_epoch, **kept)

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Read until the buffer is full or holds the first sample of the next epoch."""
        reading, packed = self._reading_buffer, self._pre_packing_buffer
        while not self._crosses_epochs(reading._restore_keys):
            if reading.len_worker() + packed.len_worker() >= self._size:
                break
            reading.append(next(source_iter))
        # Energon packs a buffer of this size only.
        self.buffer_size = max(1, reading.len_worker())
        return True

    def _crosses_epochs(self, keys: Sequence[Any]) -> bool:
        """Return whether the last of these samples is not of the first one's epoch."""
        return bool(keys) and self._epoch_of(keys[0]) != self._epoch_of(keys[-1])

    def _pack_first_epoch(self, samples: list[Any]) -> list[list[Any]]:
        """Pack the samples of one epoch; the first of the next goes back to the reading buffer."""
        keys = [get_sample_restore_key(sample) for sample in samples]
        count = len(samples) - self._crosses_epochs(keys)
        self._ended = count < len(samples)
        packs = self._pack_epoch(samples[:count])
        self._reading_buffer.extend(samples[count:])
        return packs
