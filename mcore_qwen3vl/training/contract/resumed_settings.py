"""What a resumed run takes from its checkpoint where no flag says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_qwen3vl.console import counted
from mcore_qwen3vl.data.config import LEAST_PACKING_BUFFER
from mcore_qwen3vl.errors import BadInput

if TYPE_CHECKING:  # it imports energon
    from mcore_qwen3vl.training.contract.record import RunRecord


@dataclass(frozen=True)
class ResumedRunSettings:
    """What a checkpoint was trained with, which a resumed run keeps if no flag says otherwise.

    By default the global batch is a micro-batch for each data-parallel rank, so that another number
    of ranks would train with another one, and count other samples into the schedule, without a
    word. And each data worker has its own place in the data, which cannot be cut.

    Attributes:
        load: the folder that the run resumes.
        ranks: number of ranks that trained.
        workers: data workers of each rank; 0: the ranks read the data themselves.
        shared: all ranks take turns in one order of packs, which any number of them can.
        numbered: so do all workers of all ranks, in one order of records.
        batch: samples of a step; None where the command line gives a number, or none was stored.
        record: all that decides the run's result.
    """

    load: str
    ranks: int
    workers: int
    shared: bool
    numbered: bool
    batch: int | None
    record: RunRecord

    @classmethod
    def from_command(cls, explicit: Mapping[str, Any]) -> ResumedRunSettings | None:
        """Return what the run that the command line resumes was trained with, or None."""
        from mcore_qwen3vl.data.loader_state import RECORDS
        from mcore_qwen3vl.training.checkpoints import data_state
        from mcore_qwen3vl.training.checkpoints.resume import tracked_iteration
        from mcore_qwen3vl.training.contract.record import RunRecord

        load = explicit.get("load") or explicit.get("save")
        if not load or "finetune" in explicit:
            return None
        iteration = explicit.get("ckpt_step") or tracked_iteration(load)
        if iteration is None:
            return None
        saved = data_state.first_state_of(load, iteration)
        if saved is None:
            return None
        record = RunRecord.of_checkpoint(load, iteration) or RunRecord({})
        batch_flags = ("global_batch_size", "step_batch_size_schedule", "rampup_batch_size")
        return cls(
            load,
            saved["world_size"],
            saved["num_workers"],
            saved.get("balance", False),
            saved.get("order") == RECORDS,
            None
            if any(name in explicit for name in batch_flags)
            else record.value("batch", "global_batch_size"),
            record,
        )

    def _workers_per_rank(self, ranks: int) -> int | None:
        """Return how many data workers each of `ranks` ranks needs; None: no number fits."""
        if self.shared or self.numbered or ranks == self.ranks:
            return self.workers
        total = self.workers * self.ranks
        return total // ranks if total and total % ranks == 0 else None

    def defaults(self, explicit: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """Return the defaults with which `ranks` data-parallel ranks go on with the run.

        If they cannot, BadInput names the flags to add.
        """
        asked, micro_batch_size = explicit.get("num_workers"), explicit.get("micro_batch_size", 1)
        workers = asked if self.numbered and asked is not None else self._workers_per_rank(ranks)
        if workers is None:
            raise BadInput(
                f"{self._describe_run()} Each worker has its own place in the data, and they "
                f"cannot be divided over {counted(ranks, 'data-parallel rank')}: use "
                f"{self._possible_ranks(micro_batch_size)}, or start the data anew with these "
                f"weights: --load {self.load} --finetune, and another --save."
            )
        rows, flags = micro_batch_size * ranks, []
        if self.batch is not None and self.batch % rows:
            larger = -(-self.batch // rows) * rows
            flags += [f"--global-batch-size {larger}", "--override-opt-param-scheduler"]
        if asked not in (None, workers):
            flags += [f"--num-workers {workers}"]
        if flags:
            raise BadInput(
                f"{self._describe_run()} To go on with {counted(ranks, 'data-parallel rank')} of "
                f"micro-batch {micro_batch_size}, add {' '.join(flags)}."
            )
        batch = {} if self.batch is None else {"global_batch_size": self.batch}
        return {"num_workers": workers, "packing_buffer": self._packing_buffer, **batch}

    @property
    def _packing_buffer(self) -> int:
        """The samples among which the packs of the run were chosen."""
        # Versions whose default did not grow with the length of a pack recorded it, or nothing.
        return self.record.value("packs", "packing_buffer") or LEAST_PACKING_BUFFER

    def _describe_run(self) -> str:
        """Say, as the beginning of a message, what the resumed run was saved by."""
        batch = "" if self.batch is None else f", and a global batch of {self.batch}"
        each = " each" if self.ranks > 1 else ""
        return (
            f"The run in {self.load} was saved by {counted(self.ranks, 'data-parallel rank')} with "
            f"{counted(self.workers, 'data worker')}{each}{batch}."
        )

    def _possible_ranks(self, micro_batch_size: int) -> str:
        """List the numbers of data-parallel ranks that can go on without another flag."""
        workers, rows = self.workers * self.ranks, (self.batch or 0) // micro_batch_size
        # If `batch` is None there are 0 rows, which every number divides.
        fit = [n for n in range(1, workers + 1) if workers % n == rows % n == 0]
        return " or ".join(map(str, fit or [self.ranks]))
