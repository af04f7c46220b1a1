"""The comparison engine: how far values are from what they should be, and whether that is allowed.

Values arrive in pieces, from many ranks and slices, so a comparison is a small record that merges:
the largest absolute error, the largest expected magnitude and the number of values seen. Ranks send
records, never tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.errors import CheckFailed

WORST_SHOWN = 5


@dataclass(frozen=True)
class Measurement:
    """Some of the values of one tensor, compared.

    Attributes:
        error: largest |actual - expected|; infinite where a value is not finite.
        scale: largest |expected|.
        count: values compared, each place of the tensor once.
        copies: further values compared, at places that another rank holds too.
    """

    error: float = 0.0
    scale: float = 0.0
    count: int = 0
    copies: int = 0

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(
            max(self.error, other.error),
            max(self.scale, other.scale),
            self.count + other.count,
            self.copies + other.copies,
        )

    def as_copy(self) -> Measurement:
        return replace(self, count=0, copies=self.count)


def measure(actual: Tensor, expected: Tensor) -> Measurement:
    """Compare two tensors of equal shape and any dtypes, in float32 or wider.

    Raises:
        CheckFailed: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise CheckFailed(
            f"Shapes differ: {tuple(actual.shape)} was found where {tuple(expected.shape)} was "
            "expected."
        )
    if actual.numel() == 0:
        return Measurement()
    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    expected = expected.to(actual.device, wide)
    error = (actual.to(wide) - expected).abs().max().item()
    scale = expected.abs().max().item()
    return Measurement(error if math.isfinite(error) else math.inf, scale, actual.numel())


Measurements = dict[tuple[str, str], Measurement]
"""By part and name."""


def merge(parts: Iterable[Mapping[tuple[str, str], Measurement]]) -> Measurements:
    """Join what was measured on several ranks or in several slices."""
    merged: Measurements = {}
    for part in parts:
        for key, measurement in part.items():
            merged[key] = merged.get(key, Measurement()) + measurement
    return merged


@dataclass(frozen=True)
class Finding:
    """One tensor, compared.

    Attributes:
        part: what kind of thing it is: ``logits``, ``loss``, ``gradients``, ``parameters``…
        name: which one; a Hugging Face name for weights and gradients.
        measured: the comparison.
        tolerance: largest error allowed, relative to the largest expected magnitude; 0: bitwise.
        expected_count: values the tensor has; None where any number will do.
        context: where it was found, for example the batch.
    """

    part: str
    name: str
    measured: Measurement
    tolerance: float
    expected_count: int | None = None
    context: str = ""

    @property
    def error(self) -> float:
        """The largest error relative to the largest expected magnitude."""
        m = self.measured
        if m.error == 0:
            return 0.0
        return m.error / m.scale if m.scale else math.inf

    @property
    def complete(self) -> bool:
        """Every value of the tensor was compared, once apart from copies."""
        return self.expected_count is None or self.measured.count == self.expected_count

    @property
    def ok(self) -> bool:
        return self.complete and self.error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "name": self.name,
            "context": self.context,
            "relative_error": self.error,
            "absolute_error": self.measured.error,
            "largest_expected": self.measured.scale,
            "tolerance": self.tolerance,
            "values": self.measured.count,
            "ok": self.ok,
        }

    def __str__(self) -> str:
        where = f" ({self.context})" if self.context else ""
        if not self.complete:
            return (
                f"{self.part} {self.name}{where}: {self.measured.count} of "
                f"{self.expected_count} values were compared"
            )
        return (
            f"{self.part} {self.name}{where}: relative error {self.error:.1e}, "
            f"tolerance {self.tolerance:.0e}"
        )


def findings(
    measured: Mapping[tuple[str, str], Measurement],
    tolerances: Mapping[str, float],
    *,
    counts: Mapping[tuple[str, str], int] | None = None,
    context: str = "",
) -> Iterator[Finding]:
    """Judge what was measured; with `counts`, also what should have been and was not.

    Args:
        measured: by part and name.
        tolerances: by part.
        counts: how many values each part and name has. None: not known.
        context: see :class:`Finding`.
    """
    keys = dict.fromkeys([*(counts or {}), *measured])
    for part, name in keys:
        expected = None if counts is None else counts.get((part, name), 0)
        one = measured.get((part, name), Measurement())
        yield Finding(part, name, one, tolerances[part], expected, context)


@dataclass
class Report:
    """The result of a comparison; every ``verify`` command ends in one.

    Attributes:
        title: what was compared with what.
        environment: layout, dtype, versions and whatever else the numbers depend on.
        findings: one for each tensor compared.
    """

    title: str
    environment: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Something was compared, and all of it holds."""
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def worst(self) -> dict[tuple[str, str], Finding]:
        """The worst finding for each context and part: a failed one first, then by error."""
        worst: dict[tuple[str, str], Finding] = {}
        for finding in self.findings:
            key = (finding.context, finding.part)
            if key not in worst or _badness(finding) > _badness(worst[key]):
                worst[key] = finding
        return worst

    @property
    def failures(self) -> list[Finding]:
        return sorted((f for f in self.findings if not f.ok), key=_badness, reverse=True)

    def require(self) -> None:
        """Do nothing if all is well.

        Raises:
            CheckFailed: it is not; the message names the worst findings.
        """
        if self.ok:
            return
        if not self.findings:
            raise CheckFailed(f"{self.title}: nothing was compared.")
        failures = self.failures
        lines = [str(finding) for finding in failures[:WORST_SHOWN]]
        rest = len(failures) - len(lines)
        more = f"\n  and {rest} more" if rest else ""
        raise CheckFailed(
            f"{self.title}: {len(failures)} of {len(self.findings)} comparisons failed.\n  "
            + "\n  ".join(lines)
            + more
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "ok": self.ok,
            "environment": self.environment,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def _badness(finding: Finding) -> tuple[bool, float]:
    return not finding.ok, finding.error
