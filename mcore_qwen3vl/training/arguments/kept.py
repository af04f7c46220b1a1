"""What a run that is resumed keeps where the command line does not say it: the global batch, and
the data workers of all ranks together.

By default the global batch is a micro-batch for each data-parallel rank, so that another number of
ranks would train with another one, and count other samples into the schedule, without a word. And
each data worker has its own place in the data, which cannot be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.console import counted
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Kept:
    """What a checkpoint was trained with.

    Attributes:
        workers: data workers of each of them; 0: the ranks read the data themselves.
        shared: all ranks take turns in one stream (``--balance``), which any number of them can.
        batch: samples of a step; None where the command line gives a number, or none was stored.
    """

    load: str
    ranks: int
    workers: int
    shared: bool
    batch: int | None

    @classmethod
    def of(cls, explicit: Mapping[str, Any]) -> Kept | None:
        """Return what the run that the command line resumes was trained with, or None."""
        from mcore_qwen3vl.training.broadcast import data_state
        from mcore_qwen3vl.training.checkpoints.resume import latest_iteration

        load = explicit.get("load") or explicit.get("save")
        if not load or "finetune" in explicit:
            return None
        iteration = explicit.get("ckpt_step") or latest_iteration(load)
        saved = None if iteration is None else data_state.first_of(load, iteration)
        if saved is None:
            return None
        given = ("global_batch_size", "step_batch_size_schedule", "rampup_batch_size")
        return cls(
            load,
            saved["world_size"],
            saved["num_workers"],
            saved.get("balance", False),
            None if any(name in explicit for name in given) else saved.get(data_state.GLOBAL_BATCH),
        )

    def workers_of_a_rank(self, ranks: int) -> int | None:
        """Return how many data workers each of `ranks` ranks needs; None: no number fits."""
        if self.shared or ranks == self.ranks:
            return self.workers
        total = self.workers * self.ranks
        return total // ranks if total and total % ranks == 0 else None

    def check(self, *, micro_batch_size: int, num_workers: int, ranks: int) -> None:
        """Check that the run can go on.

        Raises:
            BadInput: these ranks cannot go on as it was trained; with the flags by which they can.
        """
        workers = self.workers_of_a_rank(ranks)
        if workers is None:
            raise BadInput(
                f"{self._described()} Each worker has its own place in the data, and they cannot "
                f"be divided over {counted(ranks, 'data-parallel rank')}: use "
                f"{self._possible(micro_batch_size)}, or start the data anew with these weights: "
                f"--load {self.load} --finetune, and another --save."
            )
        rows, flags = micro_batch_size * ranks, []
        if self.batch is not None and self.batch % rows:
            larger = -(-self.batch // rows) * rows
            flags += [f"--global-batch-size {larger}", "--override-opt-param-scheduler"]
        if num_workers != workers:
            flags += [f"--num-workers {workers}"]
        if flags:
            raise BadInput(
                f"{self._described()} To go on with {counted(ranks, 'data-parallel rank')} of "
                f"micro-batch {micro_batch_size}, add {' '.join(flags)}."
            )

    def _described(self) -> str:
        batch = "" if self.batch is None else f", and a global batch of {self.batch}"
        each = " each" if self.ranks > 1 else ""
        return (
            f"The run in {self.load} was saved by {counted(self.ranks, 'data-parallel rank')} with "
            f"{counted(self.workers, 'data worker')}{each}{batch}."
        )

    def _possible(self, micro_batch_size: int) -> str:
        """List the numbers of data-parallel ranks that can go on without another flag."""
        workers, rows = self.workers * self.ranks, (self.batch or 0) // micro_batch_size
        fit = [n for n in range(1, workers + 1) if workers % n == rows % n == 0]
        return " or ".join(map(str, fit or [self.ranks]))
