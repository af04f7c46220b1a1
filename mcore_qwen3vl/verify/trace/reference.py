"""Hugging Face's values for a traced input, and the tolerance at each probe point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.verify.parity.batches import Batch, MicroBatch, build_batch
from mcore_qwen3vl.verify.parity.cached_reference import ReferenceCheckpoint
from mcore_qwen3vl.verify.parity.reference import Reference
from mcore_qwen3vl.verify.report.measurement import EPSILON, measure
from mcore_qwen3vl.verify.trace.probe_points import ProbePoint, data_path
from mcore_qwen3vl.verify.trace.recording import Recording, record
from mcore_qwen3vl.verify.trace.result import ACTIVATION_GRADIENTS, ACTIVATIONS, GRADIENTS

MARGIN = 8.0
"""The allowed error at a probe point, in units of the error of Hugging Face's own float32 run.

That run and ours round the same numbers in different orders, so their errors have the same size.
Over dense and MoE models, gradients and eight layouts the ratio stayed below 2.5 (the tests require
half of `MARGIN`). The faintest injected faults have ratios of 17 (an epsilon of 1e-5 for 1e-6 in
norms of inputs of unit size), 22 (one slow frequency given to another axis) and 2,500 (a weight
rounded to bfloat16); the others have a million.
"""


class Tolerances(dict[tuple[str, str], float]):
    """Largest relative error allowed, by part and name."""

    def of(self, part: str, name: str) -> float:
        """Return a name's tolerance; one expert of a fused tensor has the fused tensor's."""
        return self.get((part, name), self.get((part, name.partition("[")[0]), 0.0))


@dataclass(frozen=True)
class ReferenceRun:
    """Hugging Face's run of one input: the right values, and how much rounding to expect."""

    reference: Reference
    points: list[ProbePoint]
    exact: Recording
    tolerances: Tolerances


class TraceReference(ReferenceCheckpoint):
    """A Hugging Face checkpoint that traces are compared with; each result is computed once.

    Args:
        path, lora: see `ReferenceCheckpoint`.
    """

    def __init__(self, path: str | Path, lora: str | Path | None = None) -> None:
        super().__init__(path, lora)
        self._runs: dict[tuple[int, int, bool], ReferenceRun] = {}
        self._micro: dict[tuple[str, int], MicroBatch] = {}

    def micro_batch(self, name: str, multiple: int) -> MicroBatch:
        """Return the first micro-batch of the parity batch called `name`."""
        if (name, multiple) not in self._micro:
            batch = build_batch(name, self.architecture, multiple=multiple)
            self._micro[name, multiple] = batch.micro_batches[0]
        return self._micro[name, multiple]

    def run(self, batch: Batch, gradients: bool) -> ReferenceRun:
        """Run `batch`, copies of one micro-batch, in float64 and in float32."""
        key = (id(batch.micro_batches[0]), len(batch.micro_batches), gradients)
        found = self._runs.get(key)  # a run keeps its micro-batch alive, so the id stays taken
        if found is None:
            model = self.model(torch.float64)
            points = data_path(self.architecture)
            rounded = record(self.model(torch.float32), points, batch, gradients=gradients)
            exact = record(model, points, batch, gradients=gradients, keep_calls=True)
            found = ReferenceRun(model, points, exact, _tolerances(rounded, exact))
            self._runs[key] = found
        return found


def _tolerances(rounded: Recording, exact: Recording) -> Tolerances:
    """Return the rounding error of float32 itself at each probe point, times `MARGIN`."""
    pairs: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
        (ACTIVATIONS, rounded.values, exact.values),
        (ACTIVATION_GRADIENTS, rounded.gradients, exact.gradients),
        (GRADIENTS, rounded.expected.gradients, exact.expected.gradients),
        ("logits", _ends(rounded.expected.logits), _ends(exact.expected.logits)),
        ("loss", _ends(rounded.expected.losses), _ends(exact.expected.losses)),
    ]
    tolerances = Tolerances()
    for part, of_rounded, of_exact in pairs:
        for name, expected in of_exact.items():
            error = measure(of_rounded[name], expected).relative
            tolerances[part, name] = MARGIN * max(error, EPSILON)
    return tolerances


def _ends(values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"all": values[0]}
