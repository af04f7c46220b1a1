"""Hugging Face's model and its results, each computed once, and the tolerances that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.files import read_adapter
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.mcore.formats import require_huggingface
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.parity.batches import build_batch
from mcore_qwen3vl.verify.parity.case import DTYPES, Case
from mcore_qwen3vl.verify.parity.reference import AdamW, Expected, Reference, Stepped
from mcore_qwen3vl.verify.report.measurement import Measurements, findings, measure, merge

TOLERANCE = 2e-5
"""Largest error in float32, relative to the largest expected magnitude of the same tensor."""

HALF_PRECISION_FACTOR = 2.0
"""Two bf16 runs that are each within E of the truth are within 2 E of one another."""

LARGEST_TOLERANCE = 0.5
"""With a tolerance of 1, gradients that are all zero would pass."""


class ReferenceCheckpoint:
    """A Hugging Face checkpoint to compare with, loaded at most once in each dtype.

    Args:
        path: checkpoint directory.
        lora: PEFT adapter directory; PEFT's model is then the reference, and only the adapter is
            trained.
    """

    def __init__(self, path: str | Path, lora: str | Path | None = None) -> None:
        self.path = Path(path)
        require_huggingface(self.path)
        self.architecture = Architecture.from_hf(self.path)
        self.adapter = None if lora is None else read_adapter(lora, self.path)
        self.lora = None if lora is None else Path(lora)
        self._models: dict[torch.dtype, Reference] = {}

    def model(self, dtype: torch.dtype) -> Reference:
        """Return the reference in this dtype."""
        if dtype not in self._models:
            self._models[dtype] = Reference(self.path, self.lora, dtype=dtype)
        return self._models[dtype]

    def value_counts(self, frozen: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the number of values of each tensor, expert and factor, without `frozen` ones."""
        counts = {
            source.label: prod(source.piece_shape)
            for row in table(self.architecture)
            for source in row.sources
        }
        if self.adapter is not None:
            counts |= {name: factor.numel() for name, factor in self.adapter.tensors().items()}
        trained = {name: count - (frozen or {}).get(name, 0) for name, count in counts.items()}
        return {name: count for name, count in trained.items() if count}


class CachedReference(ReferenceCheckpoint):
    """A Hugging Face checkpoint and the reference's results, computed once for each batch.

    Args:
        path, lora: see `ReferenceCheckpoint`.
        dtype: dtype of the reference.
        passed: called after each pass of the reference over a batch.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str = "fp32",
        *,
        lora: str | Path | None = None,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(path, lora)
        self._dtype = DTYPES[dtype]
        self._passed = passed
        self._expected: dict[tuple[str, int], Expected] = {}
        self._stepped: dict[tuple[str, int, AdamW], Stepped] = {}

    def expected(self, batch: str, multiple: int, gradients: bool = True) -> Expected:
        """Return the reference for the batch of this name, with lengths of this multiple."""
        found = self._expected.get((batch, multiple))
        if found is None or (gradients and not found.gradients):
            made = build_batch(batch, self.architecture, multiple=multiple)
            found = self.reference.run(made, gradients=gradients)
            self._expected[batch, multiple] = found
            self._passed()
        return found

    def stepped(self, batch: str, multiple: int, adamw: AdamW) -> Stepped:
        """Return the reference's parameters after an optimizer step on this batch."""
        key = (batch, multiple, adamw)
        if key not in self._stepped:
            self._stepped[key] = self.reference.step(self.expected(batch, multiple), adamw)
        return self._stepped[key]

    @property
    def reference(self) -> Reference:
        return self.model(self._dtype)


def half_precision_tolerances(
    half: CachedReference, full: CachedReference, case: Case, batches: Iterable[str]
) -> dict[str, float]:
    """Return by part `HALF_PRECISION_FACTOR` times the worst error of HF's own bf16 run.

    Raises:
        BadInput: HF's error is so large that the comparison would prove nothing.
    """
    worst = dict.fromkeys(("logits", "loss", "gradients"), 0.0)
    for name in batches:
        ours, exact = (c.expected(name, case.multiple, case.gradients) for c in (half, full))
        measured = merge(_differences(ours, exact))
        for finding in findings(measured, worst):
            worst[finding.part] = max(worst[finding.part], finding.error)
    for part, error in worst.items():
        if error * HALF_PRECISION_FACTOR > LARGEST_TOLERANCE:
            raise BadInput(
                f"bf16: Hugging Face's own {part} differ by {error:.0%} between bf16 and float32, "
                "so that no limit would prove anything. In a MoE model, rounding sends tokens to "
                "other experts: compare it in float32 (--dtype fp32)."
            )
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
