"""The tolerances of comparisons: a constant in float32, measured in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mcore_qwen3vl.verify.parity.cached_reference import CachedReference
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.reference import Expected
from mcore_qwen3vl.verify.report.measurement import Measurements, findings, measure, merge

TOLERANCE = 2e-5
"""Largest error in float32, relative to the largest expected magnitude of the same tensor."""

HALF_PRECISION_FACTOR = 2.0
"""Two bf16 runs that are each within E of the truth are within 2 E of one another."""


def half_precision_tolerances(
    half: CachedReference, full: CachedReference, case: Case, batches: Iterable[str]
) -> dict[str, float]:
    """Return by part `HALF_PRECISION_FACTOR` times the worst error of HF's own bf16 run."""
    worst = dict.fromkeys(("logits", "loss", "gradients"), 0.0)
    for name in batches:
        ours, exact = (c.expected(name, case.multiple, case.gradients) for c in (half, full))
        measured = merge(_differences(ours, exact))
        for finding in findings(measured, worst):
            worst[finding.part] = max(worst[finding.part], finding.error)
    return {part: HALF_PRECISION_FACTOR * error for part, error in worst.items()}


def _differences(actual: Expected, expected: Expected) -> Iterator[Measurements]:
    """Measure one reference against another."""
    for number, valid in enumerate(expected.valid):
        logits, losses = actual.logits[number], actual.losses[number]
        yield {
            ("logits", "all"): measure(logits[valid], expected.logits[number][valid]),
            ("loss", "all"): measure(losses[valid], expected.losses[number][valid]),
        }
    for name, gradient in expected.gradients.items():
        if gradient.any():  # rounding has no scale where the gradient is exactly zero
            yield {("gradients", name): measure(actual.gradients[name], gradient)}
