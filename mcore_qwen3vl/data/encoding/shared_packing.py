"""Energon's packing, for packs that are divided over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon.wrappers import PackingDataset

from mcore_qwen3vl.data.encoding.packing import Division

Divide = Callable[..., Division]
"""A packer of a buffer, with the keywords of
:func:`mcore_qwen3vl.data.encoding.packing.divide`."""


class SharedPacking(PackingDataset):
    """A stream of packs in the same order on all ranks, which take them in turn.

    A rank drops the packs of the others unread. Samples that the packer leaves over go back into
    the reading buffer, whose content energon saves and restores. The order depends on the number of
    ranks at the start of the run, which is saved too. With another number of ranks, a run resumes
    with the very next pack (:func:`mcore_qwen3vl.data.loader_state.redistribute`).
    """

    _savable_fields = (
        *PackingDataset._savable_fields,
        *("buffer_size", "_width", "_rows_per_step", "_carried"),
        *("_place", "_base", "_taken", "_giving"),
    )

    def __init__(
        self, packing: PackingDataset, divide: Divide, *, rank: int, ranks: int, rows_per_step: int
    ) -> None:
        """Replace energon's packing.

        Args:
            packing: the packing that energon built, before anything is read from it.
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
        self._carried = 0  # first samples of the reading buffer that the last packing left over
        self._place = 0  # packs of all ranks that have left the buffer
        self._base = 0  # the pack from which these ranks take turns
        self._taken = 0  # packs that this rank has taken since then
        self._giving = False  # whether this rank's pack at `_place` is being delivered

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Drop the other ranks' packs first; energon calls this before each pack it delivers."""
        dropped = self._advance(len(self._pre_packing_lengths))
        del self._pre_packing_buffer[: sum(self._pre_packing_lengths[:dropped])]
        del self._pre_packing_lengths[:dropped]
        filled: bool = super()._fill_reading_buffer(source_iter, log_progress)
        return filled

    def _take(self, samples: list[Any]) -> list[list[Any]]:
        """Return the packs of a full buffer, from this rank's first one on."""
        division = self._divide(
            samples, ranks=self._width, carried=self._carried, rows_per_step=self._rows_per_step
        )
        left = [samples[index] for index in division.left]
        self._carried = len(left)
        self._reading_buffer.extend(left)
        packs = [[samples[index] for index in pack] for row in division.rows for pack in row]
        return packs[self._advance(len(packs)) :]

    def _advance(self, waiting: int) -> int:
        """Move to this rank's next pack; return how many of the waiting packs come before it."""
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
    """Change a saved state so that any number of ranks can continue from it.

    Args:
        offset: packs that this rank has delivered since then.
    """
    state["_place"] += state["_giving"]
    state["_base"] += (state["_taken"] + state["_giving"] + offset) * ranks
    state["_taken"], state["_giving"] = 0, False


def is_state(plain: Any) -> bool:
    """Return whether a part of a loader's plain state is that of :class:`SharedPacking`."""
    return isinstance(plain, dict) and plain.get("__class__") == SharedPacking.__name__
