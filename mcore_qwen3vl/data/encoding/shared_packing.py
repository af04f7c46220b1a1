"""Energon's packing for packs that all data-parallel ranks divide among themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon.wrappers import PackingDataset

from mcore_qwen3vl.data.encoding.balancing import Division

Divide = Callable[..., Division]
"""From a buffer, with the keywords of :func:`mcore_qwen3vl.data.encoding.balancing.divide`."""


class SharedPacking(PackingDataset):
    """Packs in one order, which is the same on all ranks; they take them in turns.

    A rank drops the packs of the others unread. What the packer leaves goes back into the reading
    buffer, whose content energon saves and restores. The number of ranks that a run began with
    decides the order, and is saved with it: with another number it goes on where it stood, pack
    for pack (:func:`mcore_qwen3vl.data.loading.state.redistribute`).
    """

    _savable_fields = (
        *PackingDataset._savable_fields,
        *("buffer_size", "_width", "_rows_per_step", "_carried"),
        *("_place", "_base", "_taken", "_giving"),
    )

    def __init__(
        self, packing: PackingDataset, divide: Divide, *, rank: int, ranks: int, rows_per_step: int
    ) -> None:
        """
        Args:
            packing: as energon builds it, not read from yet.
            divide: the packer.
            rank, ranks: place among those that take packs.
            rows_per_step: packs of this rank in an optimizer step.
        """
        self._divide = divide
        self._rank, self._ranks = rank, ranks
        self._width, self._rows_per_step = ranks, rows_per_step
        super().__init__(
            packing.dataset,
            packing.buffer_size,
            self._take,
            packing.final_packer,
            final_packer_stateless=packing.final_packer_stateless,
            sample_encoder=packing.sample_encoder,
            sample_encoder_stateless=packing.sample_encoder_stateless,
            pre_packer_failure_tolerance=packing.pre_packer_failure_tolerance,
            final_packer_failure_tolerance=packing.final_packer_failure_tolerance,
            sample_encoder_failure_tolerance=packing.sample_encoder_failure_tolerance,
            worker_config=packing.worker_config,
        )

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._carried = 0  # of the reading buffer's first samples
        self._place = 0  # packs that have left the buffer, of all ranks
        self._base = 0  # the pack from which these ranks take turns
        self._taken = 0  # by this rank since then
        self._giving = False  # the pack at `_place` is this rank's, and on its way

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Energon calls this before each pack that it gives."""
        dropped = self._advance(len(self._pre_packing_lengths))
        del self._pre_packing_buffer[: sum(self._pre_packing_lengths[:dropped])]
        del self._pre_packing_lengths[:dropped]
        filled: bool = super()._fill_reading_buffer(source_iter, log_progress)
        return filled

    def _take(self, samples: list[Any]) -> list[list[Any]]:
        """Packs of a full buffer, from this rank's first."""
        division = self._divide(
            samples, ranks=self._width, carried=self._carried, rows_per_step=self._rows_per_step
        )
        left = [samples[index] for index in division.left]
        self._carried = len(left)
        self._reading_buffer.extend(left)
        packs = [[samples[index] for index in pack] for row in division.rows for pack in row]
        return packs[self._advance(len(packs)) :]

    def _advance(self, waiting: int) -> int:
        """Go on to this rank's next pack; how many of the waiting ones lie before it."""
        if self._giving:
            self._place += 1
            self._taken += 1
        ahead = self._base - self._place
        ahead = ahead + self._rank if ahead > 0 else (self._rank + ahead) % self._ranks
        dropped = min(ahead, waiting)
        self._place += dropped
        self._giving = dropped < waiting
        return dropped


def go_on_with(state: dict[str, Any], offset: int, ranks: int) -> None:
    """Change a saved state, so that any number of ranks goes on from it together.

    Args:
        state: of :class:`SharedPacking`, as plain data; of any of the ranks that saved it.
        offset: packs that this rank has given since.
        ranks: that saved it.
    """
    state["_place"] += state["_giving"]
    state["_base"] += (state["_taken"] + state["_giving"] + offset) * ranks
    state["_taken"], state["_giving"] = 0, False


def is_state(plain: Any) -> bool:
    """Whether a part of a loader's plain state is that of :class:`SharedPacking`."""
    return isinstance(plain, dict) and plain.get("__class__") == SharedPacking.__name__
