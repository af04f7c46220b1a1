"""The names of each step's records, in a file for each data-parallel rank: ``--log-records``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mcore_qwen3vl.training.logs.metrics import append_json

if TYPE_CHECKING:
    from mcore_qwen3vl.data.encoding.batch import Batch


class RecordLog:
    """Notes the records of each step on this rank.

    A step that is trained again after a resume is appended again: its last line counts.
    """

    def __init__(self, folder: str | None) -> None:
        """
        Args:
            folder: where the files are; None: nothing is noted.
        """
        self._folder = None if folder is None else Path(folder)
        self._names: list[str] = []

    def count(self, batch: Batch) -> None:
        """Note a batch of the step."""
        if self._folder is not None and not batch.is_spare:
            self._names += batch.names

    def write(self, iteration: int) -> None:
        """Append a line with the step's records, on one rank of those that share them."""
        if self._folder is None:
            return
        from megatron.core import parallel_state

        from mcore_qwen3vl.data.sharing import rank_reads

        names, self._names = self._names, []
        if not rank_reads():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = parallel_state.get_data_parallel_rank()
        file = self._folder / f"rank_{rank:05d}.jsonl"
        append_json(str(file), {"iteration": iteration, "records": names})
