"""Hugging Face's values and tolerance at every probe point, and replay with changed weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, keyword arguments and output of one call of a module."""


@dataclass
class Recording:
    """Values of one micro-batch at every probe point.

    Attributes:
        points: the probe points, in the order of the data.
        micro: the micro-batch.
        values: values by probe point: (B, S, W), zero at padding; (P, W) or (N, W).
        gradients: the loss's gradients, in the same form; empty if not asked for.
        expected: logits, losses and gradients of the parameters.
        calls: each module's calls for this micro-batch, in order; a sample with images and videos
            calls the tower twice.
        tolerances: largest relative error that rounding explains, of the values in float64.
    """

    points: list[ProbePoint]
    micro: MicroBatch
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    expected: Expected
    calls: dict[str, list[Call]] = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=lambda: Tolerances())

    def assemble(self, point: ProbePoint, outputs: Sequence[Tensor]) -> Tensor:
        """Join the values of calls, in the order of :attr:`calls`, into those of the micro-batch.

        Visual rows are those of images first, then of videos, as in :class:`VisualInputs`.
        """
        micro = self.micro
        if point.rows != "tokens":
            kinds = [kind for span in micro.spans for kind in _kinds(span.sample)]
            ordered = sorted(range(len(kinds)), key=lambda i: kinds[i])  # stable
            return torch.cat([outputs[i].flatten(1) for i in ordered])
        width = outputs[0].numel() // len(micro.spans[0].sample.input_ids)
        whole = outputs[0].new_zeros(*micro.input_ids.shape, width)
        for span, output in zip(micro.spans, outputs, strict=True):
            whole[span.tokens] = output.reshape(-1, width)
        return whole


def record(
    reference: Reference,
    points: list[ProbePoint],
    batch: Batch,
    *,
    gradients: bool,
    keep_calls: bool = False,
) -> Recording:
    """Run the reference on `batch`, whose micro-batches are copies of one, and keep the first.

    With `keep_calls` every module's arguments are kept, so that a call can be repeated.
    """
    made: dict[str, list[Tensor]] = defaultdict(list)
    gradients_of: dict[str, dict[int, Tensor]] = defaultdict(dict)
    calls: dict[str, list[Call]] = defaultdict(list)

    def keep_value(point: ProbePoint, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        value = input_of(args, kwargs) if point.side == "input" else output
        tensor = point.pick(value)
        number = len(made[point.name])
        made[point.name].append(point.spread(tensor.detach(), value))
        if tensor.requires_grad:

            def keep_gradient(gradient: Tensor) -> None:
                gradients_of[point.name][number] = point.spread(gradient, value).detach()

            tensor.register_hook(keep_gradient)

    def keep_call(name: str, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[name].append((args, kwargs, output))

    hooks = [(point.module, partial(keep_value, point)) for point in points]
    if keep_calls:
        modules = dict.fromkeys(point.module for point in points)
        names = {*modules, *(name.rpartition(".")[0] for name in modules)}
        hooks += [(name, partial(keep_call, name)) for name in names]
    with ExitStack() as stack:
        for name, hook in hooks:
            module = reference.network.get_submodule(name)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        expected = reference.run(batch, gradients=gradients)
    micro, copies = batch.micro_batches[0], len(batch.micro_batches)
    recording = Recording(points, micro, {}, {}, expected)
    recording.calls = {name: every[: len(every) // copies] for name, every in calls.items()}
    for point in points:
        if every := made.get(point.name):
            first = every[: len(every) // copies]
            recording.values[point.name] = recording.assemble(point, first)
            if found := gradients_of.get(point.name):
                each = [found.get(i, torch.zeros_like(v)) for i, v in enumerate(first)]
                recording.gradients[point.name] = recording.assemble(point, each)
    return recording


def _kinds(sample: Any) -> list[int]:
    """Return a sample's calls of the vision tower: 0 for its images, 1 for its videos."""
    grids = (sample.image_grid_thw, sample.video_grid_thw)
    return [kind for kind, grid in enumerate(grids) if grid is not None]


@torch.no_grad()
def replay(model: nn.Module, recording: Recording, point: ProbePoint, **changed: Tensor) -> Tensor:
    """Return the values at `point` with some parameters of its module and the same inputs.

    `changed` has values by the parameter's name within the module.
    """
    module = model.get_submodule(point.module)
    like = next(iter(module.parameters())).dtype
    parameters = {name: value.to(like) for name, value in changed.items()}
    outputs = []
    for args, kwargs, _ in recording.calls[point.module]:
        output = torch.func.functional_call(module, parameters, args, kwargs)
        outputs.append(point.spread(point.pick(output), output))
    return recording.assemble(point, outputs)


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


class TraceReference(ReferenceCheckpoint):
    """A Hugging Face checkpoint that traces are compared with; each result is computed once."""

    def __init__(self, path: str | Path, lora: str | Path | None = None) -> None:
        super().__init__(path, lora)
        self._runs: dict[tuple[int, int, bool], Recording] = {}
        self._micro: dict[tuple[str, int], MicroBatch] = {}

    def micro_batch(self, name: str, multiple: int) -> MicroBatch:
        """Return the first micro-batch of the parity batch called `name`."""
        if (name, multiple) not in self._micro:
            batch = build_batch(name, self.architecture, multiple=multiple)
            self._micro[name, multiple] = batch.micro_batches[0]
        return self._micro[name, multiple]

    def run(self, batch: Batch, gradients: bool) -> Recording:
        """Run `batch`, copies of one micro-batch, in float64, and in float32 for the tolerances."""
        # A recording keeps its micro-batch alive, so the id stays taken.
        key = (id(batch.micro_batches[0]), len(batch.micro_batches), gradients)
        if key not in self._runs:
            points = data_path(self.architecture)
            rounded = record(self.model(), points, batch, gradients=gradients)
            model = self.model(torch.float64)
            exact = record(model, points, batch, gradients=gradients, keep_calls=True)
            exact.tolerances = _tolerances(rounded, exact)
            self._runs[key] = exact
        return self._runs[key]


def _tolerances(rounded: Recording, exact: Recording) -> Tolerances:
    """Return the rounding error of float32 itself at each probe point, times `MARGIN`."""
    pairs: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]] = [
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
