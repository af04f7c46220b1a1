"""What a batch holds for its loss besides the tokens. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self


class TaskInputs:
    """What one loss needs besides the tokens: a dataclass of tensors and batches.

    Each loss has its own, in its file of :mod:`mcore_qwen3vl.losses`. Data workers make those that
    records give; others come from a pass before the step.
    """

    @classmethod
    def of_records(
        cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any
    ) -> Self | None:
        """Return what the records of a batch give, or None if they give nothing.

        Args:
            records: :class:`~mcore_qwen3vl.data.encoding.encoder.PlannedRecord`, with their
                sequences.
            assemble: makes another batch of plans and names, as of those of the records.
            config: the :class:`~mcore_qwen3vl.data.config.DataConfig` of the batch.
        """
        raise NotImplementedError
