"""What a trace finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.parity.compare import Finding, Report

ACTIVATIONS = "activations"
SLOPES = "activation gradients"
GRADIENTS = "gradients"
WEIGHTS = "weights"


@dataclass(frozen=True)
class Cause:
    """Why a place differs, as far as an experiment shows.

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
class Trace:
    """The same input through both models, compared along the data path.

    Attributes:
        report: every comparison: activations in the order of the data, then gradients in the
            order of the backward, then weights.
        parts: which part of the model each place belongs to.
        first: the first place outside the expected rounding; None when all is well.
        cause: why, when `first` is given.
        margins: by part and name, error over the rounding that float32 itself shows there.
    """

    report: Report
    parts: dict[str, str] = field(default_factory=dict)
    first: Finding | None = None
    cause: Cause | None = None
    margins: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.report.ok

    @property
    def verdict(self) -> str:
        """One or two sentences."""
        if self.ok:
            return (
                f"All {len(self.report.findings)} comparisons are within the expected rounding of "
                "float32."
            )
        if self.first is None:
            return f"{len(self.report.failures)} comparisons failed."
        cause = f" Likely cause: {self.cause.kind}. {self.cause.explanation}" if self.cause else ""
        return f"The models part at {self.first.name} ({self.first.part}).{cause}"

    def require(self) -> None:
        """Do nothing if all is well.

        Raises:
            CheckFailed: it is not; the message is the verdict.
        """
        if not self.ok:
            raise CheckFailed(f"{self.report.title}: {self.verdict}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = self.first
        return {
            **self.report.to_dict(),
            "verdict": self.verdict,
            "first": first.to_dict() if first else None,
            "cause": vars(self.cause) if self.cause else None,
        }
