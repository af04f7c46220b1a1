"""The two factors of one Hugging Face tensor, and the place of a rank's part in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mcore_qwen3vl.converters.storage.boxes import Selection

FactorName = Literal["lora_A", "lora_B"]


class Span(NamedTuple):
    """Consecutive indices on the axis that tensor parallelism divides."""

    local: int  # first index in this rank's part
    whole: int  # first index in the whole factor
    length: int


@dataclass(frozen=True)
class Place:
    """The part of a whole factor that a rank holds.

    Attributes:
        shape: shape of the whole factor, (r, in) or (out, r); for an expert, of its own factor.
        axis: the axis that is divided; None if every rank of the group holds all of it.
        spans: the indices that this rank holds along `axis`.
        grain: a length that divides the lengths and the starts of all spans, on every rank.
    """

    shape: tuple[int, int]
    axis: int | None
    spans: tuple[Span, ...] = ()
    grain: int = 0

    @property
    def local_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        if self.axis is None:
            return rows, columns
        held = sum(span.length for span in self.spans)
        return (held, columns) if self.axis == 0 else (rows, held)

    def boxes(self) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Yield boxes that cover this rank's part: in the part, and in the whole factor."""
        rows, columns = (slice(0, size) for size in self.shape)
        if self.axis is None:
            yield (rows, columns), (rows, columns)
        for span in self.spans:
            local = slice(span.local, span.local + span.length)
            whole = slice(span.whole, span.whole + span.length)
            if self.axis == 0:
                yield (local, columns), (whole, columns)
            else:
                yield (rows, local), (rows, whole)


class Pair(nn.Module):
    """A (r, in) and B (out, r) of one linear, to whose output scaling * B A x is added.

    Call it to get the factors: Megatron's overlapped parameter gather waits for a weight when the
    module that owns it is called.

    Args:
        name: name of the Hugging Face parameter.
        a: the part of A on this rank.
        b: the part of B on this rank.
        scaling: alpha / r, or alpha / sqrt(r) with rsLoRA.
        like: the base weight, whose device and dtype the factors take.
        expert: number of the expert in the fused Hugging Face tensor, and the number of experts.
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
        self.on = True  # see mcore_qwen3vl.model.lora.adapter_module.switched_off
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
