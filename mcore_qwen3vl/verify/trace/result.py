"""The result of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_qwen3vl.verify.report.measurement import Finding
from mcore_qwen3vl.verify.report.result import Report

ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
GRADIENTS = "gradients"
WEIGHTS = "weights"

AROUND = 3
"""Probe points shown before and after the first one out of tolerance."""


@dataclass(frozen=True)
class Cause:
    """The reason why a probe point differs, as far as an experiment shows.

    Attributes:
        kind: a short name, such as ``rotary base``; ``unknown`` when no experiment fits.
        explanation: one sentence with the numbers that were found.
        evidence: the experiment and its outcome.
        confirmed: whether Hugging Face's module, with the cause assumed, computes mcore's values.
    """

    kind: str
    explanation: str
    evidence: str
    confirmed: bool = True


@dataclass
class Trace(Report):
    """The comparison of both models along the data path, for the same input.

    The findings are activations in the order of the data, then gradients in the order of the
    backward pass, then weights.

    Attributes:
        first: the first probe point outside the expected rounding; None if there is none.
        cause: why `first` differs; None if there is no `first`.
    """

    first: Finding | None = None
    cause: Cause | None = None
    failures_shown: ClassVar[int] = 5  # most of the others only follow from the first

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
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
        """Return text on the probe points before and after the first one, and their errors."""
        path = [f for f in self.findings if f.part == ACTIVATIONS]
        if self.first not in path:
            return ""
        at = path.index(self.first)
        near = path[max(at - AROUND, 0) : at + AROUND + 1]
        return "\n".join(
            f"{f.name}: {f.error:.1e}{'' if f.ok else ', out of tolerance'}" for f in near
        )
