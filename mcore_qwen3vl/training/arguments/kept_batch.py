"""The global batch size of a resumed run, if the command line does not give one.

Megatron's default is one micro-batch per data-parallel rank. Resuming with another number of ranks
would then silently change the global batch size, and with it how the schedule counts samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class KeptBatch:
    """The global batch size that a checkpoint was trained with."""

    size: int
    load: str

    @classmethod
    def of(cls, explicit: Mapping[str, Any]) -> KeptBatch | None:
        """Read the global batch size from the checkpoint that the run resumes.

        Args:
            explicit: the arguments that the command line sets, by ``dest`` name.

        Returns:
            None if the command line gives a size, if nothing is resumed, or if an earlier version
            wrote the checkpoint without it.
        """
        from mcore_qwen3vl.training.checkpoints.resume import latest_iteration
        from mcore_qwen3vl.training.feed import state

        load = explicit.get("load") or explicit.get("save")
        given = ("global_batch_size", "step_batch_size_schedule", "rampup_batch_size", "finetune")
        if not load or any(name in explicit for name in given):
            return None
        iteration = explicit.get("ckpt_step") or latest_iteration(load)
        size = None if iteration is None else state.global_batch_of(load, iteration)
        return None if size is None else cls(size, load)

    def check(self, args: argparse.Namespace, world_size: int) -> None:
        """Check that the data-parallel ranks can divide this global batch among them.

        Args:
            args: the resumed run's arguments; TP x PP x CP divides `world_size`.
            world_size: number of ranks.

        Raises:
            BadInput: the size is not a multiple of the micro-batch size times the data-parallel
                size.
        """
        sizes = ("tensor_model", "pipeline_model", "context")
        ranks = world_size
        for name in sizes:
            ranks //= getattr(args, f"{name}_parallel_size")
        rows = args.micro_batch_size * ranks
        if self.size % rows:
            raise BadInput(
                f"The run in {self.load} has a global batch of {self.size}, and {ranks} "
                f"data-parallel ranks of micro-batch {args.micro_batch_size} take {rows} samples "
                f"at once: use fewer data-parallel ranks, or give --global-batch-size {rows} with "
                "--override-opt-param-scheduler to train differently from here on."
            )
