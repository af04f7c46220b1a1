"""What an objective makes of a micro-batch: a sum to minimise, its normaliser, and sums to log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.inputs import to_device

label_module(__file__, "logits and loss")


class Reduced(NamedTuple):
    """The loss and the log's numbers for a micro-batch on this rank.

    Attributes:
        total: the sum to minimise, a scalar with a gradient.
        normaliser: divides `total` and `sums`, after each is summed over the global batch.
        sums: numbers for the log, by name: scalars without a gradient, or (2,) with a number and
            a normaliser of its own. The first is the loss.
        data_sets: for data of several data sets, the sum of each one's losses and its normaliser,
            by name: scalars without a gradient.
    """

    total: Tensor
    normaliser: Tensor
    sums: dict[str, Tensor]
    data_sets: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})


Objective = Callable[[Batch, Tensor, Tensor], Reduced]
"""``(batch, local, losses) -> Reduced``.

Args:
    batch: the micro-batch.
    local: (s,) int64 on the host: this rank's positions in the sequence.
    losses: (B, s) float32 cross entropies there.
"""


def reduce_units(total: Tensor, batch: Batch, numbers: Mapping[str, Tensor]) -> Reduced:
    """Return the loss of units, such as queries, that all ranks of a CP group have whole.

    Every CP rank has all units, but the gradients of its own tokens alone. So each rank counts 1/CP
    of the units and of the numbers.

    Args:
        total: the sum of the units' losses, with a gradient.
        batch: the micro-batch, whose units are its records or all their sequences.
        numbers: values of the units for the log, by name; their gradients are not used. The first
            are the losses.
    """
    share = 1 / parallel_state.get_context_parallel_world_size()
    losses = next(iter(numbers.values())).detach()
    return Reduced(
        total,
        torch.full([], len(losses) * share, dtype=torch.float64, device=total.device),
        {name: values.detach().sum() * share for name, values in numbers.items()},
        {
            name: (
                losses.where(members, 0.0).sum() * share,
                members.sum(dtype=torch.float64) * share,
            )
            for name, members in _units_of_data_sets(batch, losses)
        },
    )


def _units_of_data_sets(batch: Batch, losses: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each data set's name and which units are its own, a mask like `losses` (units,)."""
    names = batch.data_sets
    if len(names) > len(losses):  # several sequences make a unit
        names = tuple(
            names[end - size]  # of its first sequence
            for end, size in zip(accumulate(batch.groups), batch.groups, strict=True)
        )
    for name in dict.fromkeys(names):
        yield name, to_device(torch.tensor([data_set == name for data_set in names]), losses.device)
