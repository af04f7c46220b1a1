"""Everything that is known about the first probe point out of tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.hf.checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.report.measurement import measure
from mcore_qwen3vl.verify.trace.probe_points import ProbePoint
from mcore_qwen3vl.verify.trace.recording import Recording
from mcore_qwen3vl.verify.trace.result import ACTIVATION_GRADIENTS, ACTIVATIONS

if TYPE_CHECKING:
    from mcore_qwen3vl.verify.trace.on_rank import RankTrace
    from mcore_qwen3vl.verify.trace.reference import ReferenceRun, TraceReference


@dataclass(frozen=True)
class Divergence:
    """The first probe point out of tolerance.

    Attributes:
        hf: weights that are right.
        architecture, examined: what the two configs say, the right one first.
        case: how mcore's model ran.
        model: Hugging Face's, in float64.
        recording: its values and calls.
        part, name: the comparison that failed.
        point: the probe point; None for a parameter's gradient and for the loss.
        actual, expected: (rows, W) at the rows that were compared; empty without a probe point.
        tolerance: relative error that rounding explains.
        weights: mcore's weights around it, by HF name and in HF's shape; factors of LoRA too.
        trained: parameters of `model` that have a gradient, by the same names.
        adapter: LoRA that both models have.
    """

    hf: HuggingFaceCheckpoint
    architecture: Architecture
    examined: Architecture
    case: Case
    model: nn.Module
    recording: Recording
    part: str
    name: str
    point: ProbePoint | None
    actual: Tensor
    expected: Tensor
    rows: Tensor
    tolerance: float
    weights: dict[str, Tensor]
    trained: dict[str, nn.Parameter]
    adapter: Adapter | None

    @classmethod
    def of(
        cls,
        truth: TraceReference,
        config: Path,
        case: Case,
        run: ReferenceRun,
        first: tuple[str, str],
        found: Sequence[RankTrace],
    ) -> Divergence:
        """Put together what the ranks sent."""
        part, name = first
        recording, tolerances = run.exact, run.tolerances
        checkpoint = HuggingFaceCheckpoint(truth.path)
        point = next((p for p in run.points if p.name == name), None)
        if point is None:
            actual = expected = torch.empty(0)
            rows = torch.empty(0, dtype=torch.int64)
        else:
            known = recording.gradients if part == ACTIVATION_GRADIENTS else recording.values
            expected = known[name].flatten(0, -2)
            actual = torch.full_like(expected, torch.nan)
            for rank in found:
                for where, columns, values in rank.pieces:
                    actual[where, columns] = values.to(actual.dtype)
            rows = torch.nonzero(~actual.isnan().all(1)).squeeze(1)
            actual, expected = actual[rows], expected[rows]
        return cls(
            checkpoint,
            truth.architecture,
            Architecture.from_hf(config),
            case,
            run.reference.network,
            recording,
            part,
            name,
            point,
            actual,
            expected,
            rows,
            tolerances.of(part, name),
            _whole_weights(checkpoint, truth.adapter, found),
            run.reference.trained(),
            truth.adapter,
        )

    @property
    def forward(self) -> ProbePoint | None:
        """The probe point, if it is an activation."""
        return self.point if self.part == ACTIVATIONS else None

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
        """(rows, W) what Hugging Face has at another probe point, at the same rows."""
        return self.recording.values[name].flatten(0, -2)[self.rows]

    def stored(self, name: str) -> Tensor:
        """A weight of the Hugging Face checkpoint or the adapter, float32."""
        if self.adapter is not None:
            own = {**self.adapter.saved, **self.adapter.tensors()}
            if name in own:
                return own[name].float()
        return self.hf.read(name).float()

    def evidence(self, what: str, candidate: Tensor) -> str:
        """A sentence about an experiment that agreed."""
        return (
            f"{what} gives mcore's values to {self.distance(candidate):.1e} (rounding allows "
            f"{self.tolerance:.1e}); Hugging Face's are {self.distance(self.expected):.1e} away."
        )


def _whole_weights(
    checkpoint: HuggingFaceCheckpoint, adapter: Adapter | None, found: Sequence[Any]
) -> dict[str, Tensor]:
    factors = {} if adapter is None else adapter.tensors()
    weights: dict[str, Tensor] = {}
    for rank in found:
        for name, parts in rank.weights.items():
            shape = factors[name].shape if name in factors else checkpoint.entries[name].shape
            whole = weights.setdefault(name, torch.full(shape, torch.nan))
            for box, values in parts:
                whole[box] = values.float()
    return weights
