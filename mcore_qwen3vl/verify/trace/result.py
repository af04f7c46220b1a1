"""What a trace finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mcore_qwen3vl.verify.report.measurement import Finding
from mcore_qwen3vl.verify.report.result import Report

ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
GRADIENTS = "gradients"
WEIGHTS = "weights"

AROUND = 3
"""Places named before and after the first that is out of tolerance."""


@dataclass(frozen=True)
class Cause:
    """Why a probe point differs, as far as an experiment shows.

    Attributes:
        kind: a short name, such as ``rotary base``; ``unknown`` when no experiment fits.
        explanation: one sentence with the numbers that were found.
        evidence: what was tried and what came out.
        confirmed: with the cause assumed, Hugging Face's module computes what mcore's did.
    """

    kind: str
    explanation: str
    evidence: str
    confirmed: bool = True


@dataclass
class Trace(Report):
    """The same input through both models, compared along the data path.

    The findings are activations in the order of the data, then gradients in the order of the
    backward, then weights.

    Attributes:
        first: the first probe point outside the expected rounding; None when all is well.
        cause: why, when `first` is given.
        margins: by part and name, error over the rounding that float32 itself shows there.
    """

    first: Finding | None = None
    cause: Cause | None = None
    margins: dict[tuple[str, str], float] = field(default_factory=dict)
    failures_shown: ClassVar[int] = 5  # most of the others only follow from the first

    @property
    def verdict(self) -> str:
        """One or two sentences."""
        if self.ok:
            return (
                f"All {len(self.findings):,} comparisons are within the expected rounding of "
                "float32."
            )
        if self.first is None:
            return super().verdict
        cause = f" Likely cause: {self.cause.kind}. {self.cause.explanation}" if self.cause else ""
        return f"The models differ first at {self.first.name} ({self.first.part}).{cause}"

    @property
    def notes(self) -> dict[str, str]:
        notes = {}
        if self.first is not None:
            notes["Where"] = (
                f"{self.first.name}, {self.first.part}: relative error {self.first.error:.2e}, "
                f"where rounding allows {self.first.tolerance:.1e}. Everything before it on the "
                "data path agrees."
            )
            if around := self._around():
                notes["Around it"] = around
        if self.cause is not None:
            notes[f"Cause: {self.cause.kind}"] = self.cause.explanation
            sure = "Evidence" if self.cause.confirmed else "Evidence, not conclusive"
            notes[sure] = self.cause.evidence
        return notes

    def _around(self) -> str:
        """The probe points before and after the first, and how far off they are."""
        path = [f for f in self.findings if f.part == ACTIVATIONS]
        if self.first not in path:
            return ""
        at = path.index(self.first)
        near = path[max(at - AROUND, 0) : at + AROUND + 1]
        return "\n".join(
            f"{f.name}: {f.error:.1e}{'' if f.ok else ', out of tolerance'}" for f in near
        )
