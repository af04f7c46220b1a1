"""The adapters of a pipeline chunk as a child module: pairs of factors, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from mcore_qwen3vl.converters.storage.boxes import Selection

FactorName = Literal["lora_A", "lora_B"]
Box = tuple[slice, slice]


@dataclass(frozen=True)
class Place:
    """The part of a whole factor that a rank holds."""

    shape: tuple[int, int]  # of the whole factor, (r, in) or (out, r); for an expert, of its own
    axis: int | None  # the axis that is divided; None: every rank of the group holds all of it
    runs: tuple[range, ...] = ()  # the indices along `axis` that this rank holds, in its order
    grain: int = 0  # a length that divides the lengths and starts of all runs, on every rank

    @property
    def local_shape(self) -> tuple[int, int]:
        if self.axis is None:
            return self.shape
        held = sum(map(len, self.runs))
        return (held, self.shape[1]) if self.axis == 0 else (self.shape[0], held)

    def boxes(self, length: int | None = None) -> Iterator[tuple[Box, Box]]:
        """Yield boxes that cover this rank's part: in the part, and in the whole factor.

        A divided factor has a box for each run, or for each `length` of a run.
        """
        if self.axis is None:
            everything = slice(0, self.shape[0]), slice(0, self.shape[1])
            yield everything, everything
        local = 0
        for run in self.runs:
            step = length or len(run)
            for start in run[::step]:
                yield self._box(local, step), self._box(start, step)
                local += step

    def _box(self, start: int, length: int) -> Box:
        rows, columns = (slice(0, size) for size in self.shape)
        along = slice(start, start + length)
        return (along, columns) if self.axis == 0 else (rows, along)


class Pair(nn.Module):
    """A (r, in) and B (out, r) of one Hugging Face tensor: scaling * B A x is added to its output.

    Call it to get the factors: Megatron's overlapped parameter gather waits for a weight when the
    module that owns it is called. The factors have the device and dtype of the base weight `like`.
    `expert` is an expert's number in the fused tensor, and the number of experts.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(
        self,
        name: str,
        a: Place,
        b: Place,
        *,
        scaling: float,
        like: Tensor,
        expert: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.scaling, self.expert = name, scaling, expert
        self.on = True  # see `switched_off`
        self.places: dict[FactorName, Place] = {"lora_A": a, "lora_B": b}
        for factor, place in self.places.items():
            value = torch.zeros(place.local_shape, dtype=like.dtype, device=like.device)
            self.register_parameter(factor, nn.Parameter(value))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.lora_A, self.lora_B

    @property
    def rank(self) -> int:
        return self.places["lora_A"].shape[0]

    def whole_shape(self, factor: FactorName) -> tuple[int, int]:
        """Return the shape of the factor as PEFT stores it, with all experts together."""
        rows, columns = self.places[factor].shape
        experts = self.expert[1] if self.expert else 1
        return (rows * experts, columns) if factor == "lora_A" else (rows, columns * experts)

    def parts(self, factor: FactorName, tensor: Tensor) -> Iterator[tuple[Selection, Tensor]]:
        """Divide `tensor`, shaped like this rank's factor, into parts with boxes in PEFT's tensor.

        PEFT keeps all experts in one pair. The rows of A are ordered expert by expert. The columns
        of B are ordered rank by rank, with the experts next to one another.
        """
        for local, (rows, columns) in self.places[factor].boxes():
            if self.expert is not None:
                number, count = self.expert
                if factor == "lora_A":
                    first = number * self.rank
                    rows = slice(first + rows.start, first + rows.stop)
                else:
                    columns = slice(number, None, count)
            yield (rows, columns), tensor[local]


class AdapterModule(nn.Module):
    """All pairs of a chunk under their Hugging Face names, as in PEFT's ``base_model.model``.

    A pair is ``model.language_model.layers.3.self_attn.q_proj`` with ``lora_A`` and ``lora_B``.
    Layers are counted over the whole model. An expert's number is the last part of its name.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._groups = groups

    def put(self, pair: Pair) -> None:
        """Add a pair under its name."""
        path = pair.name.removesuffix(".weight").split(".")
        if pair.expert is not None:
            path.append(str(pair.expert[0]))
        parent: nn.Module = self
        for name in path[:-1]:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(path[-1], pair)

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Yield every pair of this rank's chunk with its path below the adapter."""
        for path, module in self.named_modules():
            if isinstance(module, Pair):
                yield path, module

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Declare the place of each factor's part in the whole factor.

        By default mcore would treat a linear's children as replicated: a run on two TP ranks would
        silently save the first rank's factors for both.
        """
        return {
            f"{prefix}{path}.{factor}": self._sharded(pair, factor)
            for path, pair in self.pairs()
            for factor in pair.places
            if getattr(pair, factor).numel()
        }

    def _sharded(self, pair: Pair, factor: FactorName) -> ShardedTensor | ShardedTensorFactory:
        groups, place = self._groups, pair.places[factor]
        tp, copies = (
            (groups.tp, groups.dp_cp) if pair.expert is None else (groups.expt_tp, groups.expt_dp)
        )
        replica = (0, 0 if place.axis is not None else tp.rank(), copies.rank())
        key = f"adapter.{pair.name}.{factor}"
        build = partial(_pieces, place, pair.expert)
        tensor = getattr(pair, factor)
        if place.axis is None or place.local_shape[place.axis] == place.grain:
            (only,) = build(key, tensor, replica)
            return only
        return ShardedTensorFactory(
            key, tensor, build, partial(_join, place.axis), replica_id=replica
        )


@contextmanager
def switched_off(adapters: Sequence[AdapterModule]) -> Iterator[None]:
    """Let the chunks of these adapters compute as if they had no factors.

    A tensor that an adapter trains whole, in place of a base weight, stays in use.
    """
    pairs = [pair for adapter in adapters for _, pair in adapter.pairs()]
    for pair in pairs:
        pair.on = False
    try:
        yield
    finally:
        for pair in pairs:
            pair.on = True


def _pieces(
    place: Place,
    expert: tuple[int, int] | None,
    key: str,
    tensor: Tensor,
    replica: Any,
    flattened_range: None = None,
) -> list[ShardedTensor]:
    """Divide a factor into parts of one regular grid, which is all that a checkpoint can hold."""
    stacked = [(0, *expert)] if expert else []
    pieces = []
    for local, whole in place.boxes(place.grain):
        offsets = list(stacked)
        if place.axis is not None:
            start, count = whole[place.axis].start, place.shape[place.axis] // place.grain
            offsets.append((place.axis + len(stacked), start // place.grain, count))
        part = tensor if tensor[local].shape == tensor.shape else tensor[local]
        piece = ShardedTensor.from_rank_offsets(
            key, part, *offsets, replica_id=replica, prepend_axis_num=len(stacked)
        )
        pieces.append(piece)
    return pieces


@torch.no_grad()
def _join(axis: int, pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces, dim=axis)
