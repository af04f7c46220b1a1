"""The global batch of a run that is resumed, where the command line does not say one.

By default it is a micro-batch for each data-parallel rank, so that another number of ranks would
train with another one, and count other samples into the schedule, without a word.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class KeptBatch:
    """The global batch that a checkpoint was trained with."""

    size: int
    load: str

    @classmethod
    def of(cls, explicit: Mapping[str, Any]) -> KeptBatch | None:
        """
        Args:
            explicit: what the command line sets, by ``dest`` name.

        Returns:
            None where a size is given, where nothing is resumed, and for checkpoints of versions
            that did not store it.
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
        """
        Args:
            args: of the run that goes on; its layout divides `world_size`.
            world_size: number of ranks.

        Raises:
            BadInput: its ranks cannot take this many samples.
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
