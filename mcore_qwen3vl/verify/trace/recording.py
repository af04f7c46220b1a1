"""Hugging Face's values at every probe point, and how far rounding may be from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.measurement import EPSILON, measure
from mcore_qwen3vl.verify.parity.batches import Batch, MicroBatch, build_batch
from mcore_qwen3vl.verify.parity.reference import Expected, Reference, ReferenceCheckpoint
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    ProbePoint,
    data_path,
    input_of,
)


class Tolerances(dict[tuple[str, str], float]):
    """Largest relative error allowed, by part and name."""

    def __missing__(self, key: tuple[str, str]) -> float:
        """Return the fused tensor's tolerance for one expert of it; 0 for what is exact."""
        part, name = key
        return self.get((part, name.partition("[")[0]), 0.0)


@dataclass
class Recording:
    """Values of one micro-batch at every probe point.

    Attributes:
        points: the probe points, in the order of the data.
        micro: the micro-batch.
        values: values by probe point: (B, S, W), zero at padding; (P, W) or (N, W).
        gradients: the loss's gradients, in the same form; empty if not asked for.
        expected: logits, losses and gradients of the parameters.
        tolerances: largest relative error that rounding explains, of the values in float64.
    """

    points: list[ProbePoint]
    micro: MicroBatch
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    expected: Expected
    tolerances: Tolerances = field(default_factory=Tolerances)

    def assemble(self, point: ProbePoint, outputs: Sequence[Tensor]) -> Tensor:
        """Join the values of a module's calls, in their order, into those of the micro-batch.

        Visual rows are those of images first, then of videos, as in :class:`VisualInputs`.
        """
        micro = self.micro
        if point.rows != "tokens":
            # A sample calls the tower once for its images, and once more for its videos.
            calls = [
                kind
                for span in micro.spans
                for kind in ("image", "video")
                if getattr(span.sample, f"{kind}_grid_thw") is not None
            ]
            images_first = sorted(range(len(calls)), key=calls.__getitem__)  # stable
            return torch.cat([outputs[i].flatten(1) for i in images_first])
        width = outputs[0].numel() // len(micro.spans[0].sample.input_ids)
        values = outputs[0].new_zeros(*micro.input_ids.shape, width)
        for span, output in zip(micro.spans, outputs, strict=True):
            values[span.tokens] = output.reshape(-1, width)
        return values


def record(
    reference: Reference,
    points: list[ProbePoint],
    batch: Batch,
    *,
    gradients: bool,
) -> Recording:
    """Run the reference on `batch`, whose micro-batches are copies of one, and keep the first."""
    values_of: dict[str, list[Tensor]] = defaultdict(list)
    gradients_of: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def keep_value(point: ProbePoint, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        value = input_of(args, kwargs) if point.side == "input" else output
        tensor = point.pick(value)
        number = len(values_of[point.name])
        values_of[point.name].append(point.spread(tensor.detach(), value))
        if tensor.requires_grad:

            def keep_gradient(gradient: Tensor) -> None:
                gradients_of[point.name][number] = point.spread(gradient, value).detach()

            tensor.register_hook(keep_gradient)

    with ExitStack() as stack:
        for point in points:
            module = reference.network.get_submodule(point.module)
            hook = module.register_forward_hook(partial(keep_value, point), with_kwargs=True)
            stack.callback(hook.remove)
        expected = reference.run(batch, gradients=gradients)
    micro, copies = batch.micro_batches[0], len(batch.micro_batches)
    recording = Recording(points, micro, {}, {}, expected)
    for point in points:
        if values := values_of.get(point.name):
            first = values[: len(values) // copies]
            recording.values[point.name] = recording.assemble(point, first)
            if by_call := gradients_of.get(point.name):
                each = [by_call.get(i, torch.zeros_like(v)) for i, v in enumerate(first)]
                recording.gradients[point.name] = recording.assemble(point, each)
    return recording


MARGIN = 8.0
"""The allowed error at a probe point, in units of the error of Hugging Face's own float32 run.

That run and ours round the same numbers in different orders, so their errors have the same size.
Over dense and MoE models, gradients and eight layouts the ratio stayed below 2.5 (the tests require
half of `MARGIN`). The faintest injected faults have ratios of 17 (an epsilon of 1e-5 for 1e-6 in
norms of inputs of unit size), 22 (one slow frequency given to another axis) and 2,500 (a weight
rounded to bfloat16); the others have a million.
"""


class TraceReference(ReferenceCheckpoint):
    """A Hugging Face checkpoint that traces are compared with; each result is computed once."""

    def __init__(self, path: str | Path, lora: str | Path | None = None) -> None:
        super().__init__(path, lora)
        self._recordings: dict[tuple[int, int, bool], Recording] = {}
        self._micro: dict[tuple[str, int], MicroBatch] = {}

    def micro_batch(self, name: str, multiple: int) -> MicroBatch:
        """Return the first micro-batch of the parity batch called `name`."""
        if (name, multiple) not in self._micro:
            batch = build_batch(name, self.architecture, multiple=multiple)
            self._micro[name, multiple] = batch.micro_batches[0]
        return self._micro[name, multiple]

    def recording(self, batch: Batch, gradients: bool) -> Recording:
        """Record `batch`, copies of one micro-batch, in float64; in float32 for the tolerances."""
        # A recording keeps its micro-batch alive, so the id stays taken.
        key = (id(batch.micro_batches[0]), len(batch.micro_batches), gradients)
        if key not in self._recordings:
            points = data_path(self.architecture)
            rounded = record(self.model(), points, batch, gradients=gradients)
            exact = record(self.model(torch.float64), points, batch, gradients=gradients)
            exact.tolerances = _tolerances(rounded, exact)
            self._recordings[key] = exact
        return self._recordings[key]


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
