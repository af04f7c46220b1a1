"""Energon's packing, epoch by epoch: no sample is packed before all of the epoch before it are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.energon.wrappers import PackingDataset
from megatron.energon.wrappers.base import get_sample_restore_key

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
        super().__init__(pre_packer=self._split, **kept)

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        reading, packed = self._reading_buffer, self._pre_packing_buffer
        while not self._ends(reading._restore_keys):
            if reading.len_worker() + packed.len_worker() >= self._size:
                break
            reading.append(next(source_iter))
        # Energon packs a buffer of this size only.
        self.buffer_size = max(1, reading.len_worker())
        return True

    def _ends(self, keys: Sequence[Any]) -> bool:
        """Return whether the last of these samples is not of the first one's epoch."""
        return bool(keys) and self._epoch_of(keys[0]) != self._epoch_of(keys[-1])

    def _split(self, samples: list[Any]) -> list[list[Any]]:
        keys = [get_sample_restore_key(sample) for sample in samples]
        count = len(samples) - self._ends(keys)
        self._ended = count < len(samples)
        packs = self._pack_epoch(samples[:count])
        self._reading_buffer.extend(samples[count:])
        return packs
