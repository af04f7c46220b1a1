"""Checkpoint entries of experts held in one parameter, in the form of mcore's ``SequentialMLP``.

Source: mcore ``SequentialMLP.sharded_state_dict``, ``apply_swiglu_sharded_factory``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import divide
from torch import Tensor, nn

Offset = tuple[int, int, int]
"""Axis, index on it, and number of indices: mcore's rank offset."""

_WEIGHT, _EXTRA = "weight", "_extra_state"


@dataclass(frozen=True)
class Stored:
    """One of the experts' two linears in distributed checkpoints, as boxes of one tensor.

    Attributes:
        cut: the axis of an expert's (out, in) that ETP divides; on axis 0 gate and up are divided
            separately.
        groups: the model's process groups.
    """

    cut: Literal[0, 1]
    groups: ProcessGroupCollection

    def part(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of this rank's part of an expert's (out, in)."""
        out, into = shape
        size = self.groups.expt_tp.size()
        return (divide(out, size), into) if self.cut == 0 else (out, divide(into, size))

    def entries(
        self, key: str, weight: nn.Parameter, offsets: tuple[Offset, ...]
    ) -> Iterator[tuple[str, ShardedTensorFactory | ShardedObject]]:
        """Yield the entries of a linear in ``sharded_state_dict()``, by name below the linear.

        Args:
            key: the linear's key in the checkpoint, with a dot.
            weight: (E, out, in), this rank's part.
            offsets: offsets among the layers, if these are stacked.
        """
        etp, copy = self.groups.expt_tp.rank(), self.groups.expt_dp.rank()
        experts = [*self._experts(len(weight))]

        @torch.no_grad()
        def build(key: str, whole: Tensor, replica: Any, _range: Any) -> list[ShardedTensor]:
            return [
                piece
                for number, one in zip(experts, whole, strict=True)
                for piece in self._pieces(key, one, (*offsets, (len(offsets), *number)), replica)
            ]

        @torch.no_grad()
        def merge(pieces: list[Tensor]) -> Tensor:
            return torch.cat(pieces).view(weight.shape)

        yield (
            _WEIGHT,
            ShardedTensorFactory(f"{key}{_WEIGHT}", weight, build, merge, replica_id=(0, 0, copy)),
        )
        # Entries for FP8's scales, which the te spec expects when it loads.
        for local, number in enumerate(experts):
            places = [(place, count) for _, place, count in offsets] + [number]
            at, shape = zip(*places, strict=True)
            replica = (0, etp, copy)
            yield f"{_EXTRA}{local}", ShardedObject(f"{key}{_EXTRA}", None, shape, at, replica)

    def _experts(self, held: int) -> Iterator[tuple[int, int]]:
        """Yield, for each expert of the rank, its number and the number of all experts."""
        first, all_of_them = self.groups.ep.rank() * held, self.groups.ep.size() * held
        for local in range(held):
            yield first + local, all_of_them

    def _pieces(
        self, key: str, one: Tensor, offsets: tuple[Offset, ...], replica: Any
    ) -> Iterator[ShardedTensor]:
        """Yield the boxes of one expert (out, in)."""
        stacked, etp = len(offsets), self.groups.expt_tp
        parts = one.chunk(2) if self.cut == 0 else (one,)
        for number, part in enumerate(parts):
            place = (
                stacked + self.cut,
                number * etp.size() + etp.rank(),
                len(parts) * etp.size(),
            )
            yield ShardedTensor.from_rank_offsets(
                key, part, *offsets, place, replica_id=replica, prepend_axis_num=stacked
            )


def save_each(experts: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Name each expert as in Megatron's legacy format; a hook of ``state_dict()``."""
    for parameter, _ in experts.named_parameters():
        weight = state.pop(f"{prefix}{parameter}")
        name = parameter.removesuffix(f".{_WEIGHT}")
        for number, one in enumerate(weight):
            local = _local(prefix, number, name)
            state[f"{local}.{_WEIGHT}"] = one
            state[f"{local}.{_EXTRA}"] = None


def load_each(experts: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept the names of :func:`save_each` and :class:`Stored`; a ``load_state_dict()`` hook."""
    for parameter, weight in experts.named_parameters():
        name = parameter.removesuffix(f".{_WEIGHT}")
        locals_ = [_local(prefix, number, name) for number in range(len(weight))]
        if all(f"{local}.{_WEIGHT}" in state for local in locals_):
            each = [state.pop(f"{local}.{_WEIGHT}") for local in locals_]
            state[f"{prefix}{parameter}"] = torch.stack(each)
        for number, local in enumerate(locals_):
            state.pop(f"{local}.{_EXTRA}", None)
            state.pop(f"{prefix}{name}.{_EXTRA}{number}", None)


def _local(prefix: str, number: int, linear: str) -> str:
    return f"{prefix}local_experts.{number}.{linear}"
