"""The events of a run, for a program that starts one and watches it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # they import torch, which the first checks of a run do without
    from torch import nn

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.model.flops import Trained

Phase = Literal["forward and backward", "finalize gradients", "log"]
FORWARD_BACKWARD: Phase = "forward and backward"
"""The passes of all micro-batches of a step, within which gradients are finalized."""
FINALIZE: Phase = "finalize gradients"
"""What happens once to a step's gradients: they are reduced, and divided by the normaliser."""
LOG: Phase = "log"
"""All that is done for the log: our numbers within :data:`FINALIZE`, the rest after the step."""


@dataclass(frozen=True)
class Built:
    """What a rank has built before its first step."""

    chunks: list[nn.Module]
    """The model's pipeline chunks, within Megatron's wrappers."""
    optimizer: Any
    """Megatron's optimizer."""
    second: list[nn.Module]
    """The chunks of the second model; none if the run has no such model."""
    trained: Trained
    """How much of the model trains, over all ranks."""


class RunObserver:
    """Hears of each event of a run on this rank. Its methods do nothing: override some of them.

    A run begins once, unless it has ``--skip-train``. Each step takes one batch for each
    micro-batch, and the log follows.
    """

    def begin(self, built: Built) -> None:
        """Model and optimizer are built, and no checkpoint has been read."""

    def batch(self, batch: Batch) -> None:
        """A batch of the training data is next. It is on the host, and has no pixels."""

    def step(self, iteration: int) -> None:
        """The step of this iteration has been taken, or left out; its log follows."""

    def during(self, phase: Phase) -> AbstractContextManager[object]:
        """Return the context in which the run does what belongs to `phase`."""
        return nullcontext()
