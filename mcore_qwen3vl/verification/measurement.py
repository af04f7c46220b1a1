"""The comparison engine: how far values are from the expected ones, and whether that is allowed.

Values arrive in pieces from many ranks and slices, so a comparison is a small record that can be
merged: the largest absolute error, the largest expected magnitude and the number of values seen.
Ranks send records, never tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mcore_qwen3vl.errors import CheckFailed

if TYPE_CHECKING:  # a report that was handed over is checked without torch
    from torch import Tensor

EPSILON = 2.0**-23

_MOST_VALUES = 1 << 24  # compared at a time, unless bit by bit


@dataclass(frozen=True)
class Measurement:
    """The comparison of some values of one tensor.

    Attributes:
        absolute_error: largest |actual - expected|; infinite if a value is not finite.
        scale: largest |expected|; in a bitwise comparison, only over blocks that differ.
        count: number of compared values, each place of the tensor once.
        copies: number of further compared values, at places that another rank holds too.
        different: number of values in `count` that differ in any bit; in bitwise comparisons only.
        copies_different: number of values in `copies` that differ in any bit, likewise.
    """

    absolute_error: float = 0.0
    scale: float = 0.0
    count: int = 0
    copies: int = 0
    different: int = 0
    copies_different: int = 0

    @property
    def relative(self) -> float:
        """The largest error over the largest expected magnitude."""
        if self.absolute_error == 0:
            return 0.0
        return self.absolute_error / self.scale if self.scale else math.inf

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(
            max(self.absolute_error, other.absolute_error),
            max(self.scale, other.scale),
            self.count + other.count,
            self.copies + other.copies,
            self.different + other.different,
            self.copies_different + other.copies_different,
        )


def measure(
    actual: Tensor, expected: Tensor, *, bitwise: bool = False, main: bool = True
) -> Measurement:
    """Compare two tensors of equal shape.

    Args:
        bitwise: compare bits, so that zeros of different sign differ and equal NaNs do not;
            otherwise compare in float32 or wider.
        main: whether no other rank answers for these places; otherwise the values are copies.

    Raises:
        CheckFailed: the shapes differ or, if `bitwise`, the dtypes.
    """
    if actual.shape != expected.shape:
        raise CheckFailed(
            f"Shapes differ: {tuple(actual.shape)} was found where {tuple(expected.shape)} was "
            "expected."
        )
    if actual.numel() == 0:
        return Measurement()
    if bitwise:
        m = _measure_bits(actual, expected.to(actual.device))
    else:
        m = _measure_values(actual, expected)
    if main:
        return m
    return replace(m, count=0, copies=m.count, different=0, copies_different=m.different)


def _measure_values(actual: Tensor, expected: Tensor) -> Measurement:
    """Measure some rows at a time: differences of a whole embedding would take gigabytes."""
    import torch

    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    actual, expected = torch.atleast_1d(actual), torch.atleast_1d(expected)
    rows = max(1, _MOST_VALUES * len(actual) // actual.numel())
    measured = Measurement()
    for ours, right in zip(actual.split(rows), expected.split(rows), strict=True):
        ours, right = ours.to(wide), right.to(actual.device, wide)
        error, scale = (ours - right).abs().max().item(), right.abs().max().item()
        measured += Measurement(error if math.isfinite(error) else math.inf, scale, ours.numel())
    return measured


def _measure_bits(actual: Tensor, expected: Tensor) -> Measurement:
    """Count the values whose bits differ; only if there are any, measure how far they are apart."""
    import torch

    if actual.dtype != expected.dtype:
        raise CheckFailed(
            f"Dtypes differ: {actual.dtype} was found where {expected.dtype} was expected."
        )
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_bits = integers[actual.element_size()]
    a, b = actual.contiguous().view(as_bits), expected.contiguous().view(as_bits)
    if torch.equal(a, b):
        return Measurement(count=actual.numel())
    unequal = a != b
    distance = _measure_values(actual[unequal].double(), expected[unequal].double())
    scale = expected.double().abs().max().item()
    return Measurement(distance.absolute_error, scale, actual.numel(), different=distance.count)


Measurements = dict[tuple[str, str], Measurement]
"""Measurements by part and name."""

FROZEN = "frozen"
"""The part whose measurements only count the frozen values of each tensor."""


def merge(parts: Iterable[Mapping[tuple[str, str], Measurement]]) -> Measurements:
    """Join the measurements of several ranks or slices."""
    merged: Measurements = {}
    for part in parts:
        for key, measurement in part.items():
            merged[key] = merged.get(key, Measurement()) + measurement
    return merged


def take_frozen(measured: Measurements) -> dict[str, int]:
    """Remove the counts of frozen values from `measured`, and return them by tensor."""
    keys = [key for key in measured if key[0] == FROZEN]
    return {name: measured.pop((part, name)).count for part, name in keys}


@dataclass(frozen=True)
class Finding:
    """The comparison of one thing: a tensor, an activation or a file.

    Attributes:
        part: the kind of thing: ``logits``, ``gradients``, ``tensors``, ``files``…
        name: name of the thing; a Hugging Face name for weights and gradients.
        measured: the measurement; empty if there are no numbers to compare.
        tolerance: largest error allowed, relative to the largest expected magnitude; 0: bitwise.
        expected_count: number of values of the tensor; None: any number will do.
        context: where it was found, for example the batch.
        flaw: why it fails whatever the numbers, for example ``only in A``; empty if it does not.
    """

    part: str
    name: str
    measured: Measurement = Measurement()
    tolerance: float = 0.0
    expected_count: int | None = None
    context: str = ""
    flaw: str = ""

    @property
    def relative_error(self) -> float:
        """The largest error relative to the largest expected magnitude."""
        return self.measured.relative

    @property
    def complete(self) -> bool:
        """Whether every value of the tensor was compared, and only once apart from copies."""
        return self.expected_count is None or self.measured.count == self.expected_count

    @property
    def ok(self) -> bool:
        bits = self.tolerance == 0 and (self.measured.different or self.measured.copies_different)
        return not (self.flaw or bits) and self.complete and self.relative_error <= self.tolerance

    @property
    def badness(self) -> tuple[bool, float]:
        """The sort key: failures, then error over tolerance, or float32's epsilon if bitwise."""
        return not self.ok, self.relative_error / (self.tolerance or EPSILON)

    @property
    def detail(self) -> str:
        """A few words on what the error alone does not say."""
        m = self.measured
        at_most = f"by at most {m.absolute_error:.3g}"
        if self.flaw:
            return self.flaw
        if not self.complete:
            return f"{m.count} of {self.expected_count} values were compared"
        if m.different:
            return f"{m.different} values differ, {at_most}"
        if m.copies_different:
            return f"{m.copies_different} copies on other ranks differ, {at_most}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: infinities as text, null for the scale of a bitwise one."""
        m = self.measured
        return {
            "part": self.part,
            "context": self.context,
            "name": self.name,
            "ok": self.ok,
            "relative_error": _finite_or_text(self.relative_error),
            "absolute_error": _finite_or_text(m.absolute_error),
            "largest_expected": _finite_or_text(m.scale) if self.tolerance else None,
            "tolerance": self.tolerance,
            "values": m.count,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        where = f" ({self.context})" if self.context else ""
        error = f"relative error {self.relative_error:.1e}, tolerance {self.tolerance:.0e}"
        return f"{self.part} {self.name}{where}: {self.detail or error}"


def judge_measurements(
    measured: Mapping[tuple[str, str], Measurement],
    tolerances: Mapping[str, float],
    *,
    counts: Mapping[tuple[str, str], int] | None = None,
    context: str = "",
) -> Iterator[Finding]:
    """Judge the measurements; with `counts`, also those that are missing.

    `counts` has the number of values by part and name.
    """
    for part, name in dict.fromkeys([*(counts or {}), *measured]):
        expected = None if counts is None else counts.get((part, name), 0)
        measurement = measured.get((part, name), Measurement())
        yield Finding(part, name, measurement, tolerances[part], expected, context)


def _finite_or_text(value: float) -> float | str:
    """Return a number as JSON has it, which knows no infinity."""
    return value if math.isfinite(value) else str(value)
