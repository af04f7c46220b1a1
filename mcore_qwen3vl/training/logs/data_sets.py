"""The loss of each data set of a mixture, for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class DataSetLosses:
    """Sums of losses that stay on the device until the log is written."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: names of the data sets, in the same order on all ranks.
        """
        self._names = tuple(dict.fromkeys(names))
        self._loss = ""
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: str, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a micro-batch, without a host sync.

        Args:
            loss: name of the loss.
            parts: sum of the losses and normaliser of each of its data sets, by name; scalars.
        """
        self._loss = loss
        for name, part in parts.items():
            pair = torch.stack([value.detach().double() for value in part])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def report(self) -> dict[str, float]:
        """Return the mean loss of each data set since the last report, over all ranks.

        All ranks call this. Those before the last pipeline stage, which have no loss, get nothing.
        A data set without a trained token since then is left out.
        """
        if not self._names or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        sums = torch.stack([self._sums.get(name, nothing) for name in self._names])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        self._sums = {}
        return {
            f"{self._loss} {name}": total / normaliser
            for name, (total, normaliser) in zip(self._names, sums.tolist(), strict=True)
            if normaliser
        }
