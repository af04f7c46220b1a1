"""Everything that is known about the first place out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.report.compare import measure
from mcore_qwen3vl.verify.trace.places import Place
from mcore_qwen3vl.verify.trace.recording import Recording
from mcore_qwen3vl.verify.trace.result import ACTIVATIONS, SLOPES

if TYPE_CHECKING:
    from mcore_qwen3vl.verify.trace.ranks import Found
    from mcore_qwen3vl.verify.trace.run import Yardstick


@dataclass(frozen=True)
class Scene:
    """The first place out of bounds.

    Attributes:
        hf: weights that are right.
        truth, examined: what the two configs say.
        case: how mcore's model ran.
        model: Hugging Face's, in float64.
        recording: its values and calls.
        part, name: the comparison that failed.
        place: the place; None for a parameter's gradient and for the loss.
        actual, expected: (rows, W) at the rows that were compared; empty without a place.
        tolerance: relative error that rounding explains.
        weights: mcore's weights around the place, by HF name and in HF's shape.
    """

    hf: HuggingFaceCheckpoint
    truth: Architecture
    examined: Architecture
    case: Case
    model: nn.Module
    recording: Recording
    part: str
    name: str
    place: Place | None
    actual: Tensor
    expected: Tensor
    rows: Tensor
    tolerance: float
    weights: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        hf: Path,
        config: Path,
        case: Case,
        yardstick: Yardstick,
        first: tuple[str, str],
        found: Sequence[Found],
    ) -> Scene:
        """Put together what the ranks sent."""
        part, name = first
        recording, allowed = yardstick.exact, yardstick.allowed
        checkpoint = HuggingFaceCheckpoint(hf)
        place = next((p for p in yardstick.places if p.name == name), None)
        if place is None:
            actual = expected = torch.empty(0)
            rows = torch.empty(0, dtype=torch.int64)
        else:
            known = recording.gradients if part == SLOPES else recording.values
            expected = known[name].flatten(0, -2)
            actual = torch.full_like(expected, torch.nan)
            for rank in found:
                for where, columns, values in rank.pieces:
                    actual[where, columns] = values.to(actual.dtype)
            rows = torch.nonzero(~actual.isnan().all(1)).squeeze(1)
            actual, expected = actual[rows], expected[rows]
        return cls(
            checkpoint,
            Architecture.from_hf(hf),
            Architecture.from_hf(config),
            case,
            yardstick.reference.model,
            recording,
            part,
            name,
            place,
            actual,
            expected,
            rows,
            allowed.get(first, allowed.get((part, name.partition("[")[0]), 0.0)),
            _whole_weights(checkpoint, found),
        )

    @property
    def forward(self) -> Place | None:
        """The place, if it is an activation."""
        return self.place if self.part == ACTIVATIONS else None

    def distance(self, candidate: Tensor) -> float:
        """Relative error of mcore's values against `candidate`, (B, S, W) or (rows, W)."""
        if candidate.ndim == 3:
            candidate = candidate.flatten(0, -2)
        if len(candidate) != len(self.actual):
            candidate = candidate[self.rows]
        return measure(self.actual, candidate).relative

    def explains(self, candidate: Tensor) -> bool:
        """mcore computed `candidate`, up to rounding."""
        return self.distance(candidate) <= self.tolerance

    def value(self, name: str) -> Tensor:
        """(rows, W) what Hugging Face has at another place, at the same rows."""
        return self.recording.values[name].flatten(0, -2)[self.rows]

    def stored(self, name: str) -> Tensor:
        """A weight of the Hugging Face checkpoint, float32."""
        return self.hf.read(name).float()

    def evidence(self, what: str, candidate: Tensor) -> str:
        """A sentence about an experiment that agreed."""
        return (
            f"{what} gives mcore's values to {self.distance(candidate):.1e} (rounding allows "
            f"{self.tolerance:.1e}); Hugging Face's are {self.distance(self.expected):.1e} away."
        )


def _whole_weights(checkpoint: HuggingFaceCheckpoint, found: Sequence[Any]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for rank in found:
        for name, parts in rank.weights.items():
            whole = weights.setdefault(name, torch.full(checkpoint.entries[name].shape, torch.nan))
            for box, values in parts:
                whole[box] = values.float()
    return weights
