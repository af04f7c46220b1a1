"""Trace one input through both models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verify.parity.batches import Batch, MicroBatch, build_batch
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.reference import Reference
from mcore_qwen3vl.verify.report.compare import (
    EPSILON,
    Finding,
    Measurement,
    Measurements,
    measure,
    merge,
)
from mcore_qwen3vl.verify.trace.places import Place, data_path
from mcore_qwen3vl.verify.trace.recording import Recording, record
from mcore_qwen3vl.verify.trace.result import ACTIVATIONS, GRADIENTS, SLOPES, WEIGHTS, Trace

MARGIN = 8.0
"""How many times the rounding that Hugging Face's own float32 run shows at a place is allowed.

That run and ours round the same numbers in different orders, so their errors are of one size: over
dense and MoE models, gradients and eight layouts the ratio stayed below 2.5 (the tests require half
of this). The faintest planted mistakes have ratios of 17 (an epsilon of 1e-5 for 1e-6 in norms of
inputs of unit size), 22 (one slow frequency given to another axis) and 2,500 (a weight rounded to
bfloat16); the others a million.
"""

Expectations = dict[tuple[str, str], float]
"""Allowed relative error by part and name."""


@dataclass(frozen=True)
class Yardstick:
    """One input through Hugging Face's model: what is right, and how much rounding to expect."""

    reference: Reference
    places: list[Place]
    exact: Recording
    allowed: Expectations


class Truth:
    """A Hugging Face checkpoint; what it computes is computed once.

    Args:
        path: checkpoint directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.architecture = Architecture.from_hf(self.path)
        self._rounded: Reference | None = None
        self._exact: Reference | None = None
        self._yardsticks: dict[tuple[int, int, bool], Yardstick] = {}
        self._micro: dict[tuple[str, int], MicroBatch] = {}

    def micro_batch(self, name: str, multiple: int) -> MicroBatch:
        """The first micro-batch of the parity batch of this name."""
        if (name, multiple) not in self._micro:
            batch = build_batch(name, self.architecture, multiple=multiple)
            self._micro[name, multiple] = batch.micro_batches[0]
        return self._micro[name, multiple]

    def yardstick(self, batch: Batch, gradients: bool) -> Yardstick:
        """Run `batch`, copies of one micro-batch, in float64 and in float32."""
        key = (id(batch.micro_batches[0]), len(batch.micro_batches), gradients)
        found = self._yardsticks.get(key)  # which keeps the micro-batch alive, and its id taken
        if found is None:
            self._rounded = self._rounded or Reference(self.path)
            self._exact = self._exact or Reference(self.path, dtype=torch.float64)
            places = data_path(self.architecture)
            rounded = record(self._rounded, places, batch, gradients=gradients)
            exact = record(self._exact, places, batch, gradients=gradients, keep_calls=True)
            found = Yardstick(self._exact, places, exact, _allowed(rounded, exact))
            self._yardsticks[key] = found
        return found


def trace(
    hf: str | Path | Truth,
    mcore: str | Path | None = None,
    *,
    layout: Layout | None = None,
    micro: MicroBatch | None = None,
    batch: str = "mixed",
    gradients: bool = False,
    case: Case | None = None,
    timeout: float = 600.0,
) -> Trace:
    """Run the same input through Hugging Face's model and ours, and compare every place.

    Hugging Face's model in float64 says what is right, and in float32 how much rounding to expect
    at each place: an error of more than `MARGIN` times that (and at least float32's epsilon) is
    out of bounds.

    Args:
        hf: Hugging Face checkpoint directory: the truth. A :class:`Truth` remembers what it
            computed, for several traces.
        mcore: Megatron-Core checkpoint to examine; None: the model is loaded from `hf`.
        layout: parallel sizes; default: one rank.
        micro: the input, as from :func:`mcore_qwen3vl.verify.trace.input.from_prompt`; default:
            the first micro-batch of the parity batch called `batch`.
        gradients: compare gradients of activations and of parameters too.
        case: how the model runs, if more than `layout` is wanted.
        timeout: seconds for the ranks to finish.

    Raises:
        BadInput: a checkpoint, the layout or the batch cannot be used, or the two checkpoints are
            of different shape.
    """
    source = hf if isinstance(hf, Truth) else Truth(hf)
    hf, truth = source.path, source.architecture
    mcore = None if mcore is None else Path(mcore)
    config = _config_folder(mcore) if mcore else hf
    case = replace(case or Case(), layout=layout or Layout(), gradients=gradients)
    _check_same_shape(truth, Architecture.from_hf(config))
    if micro is None:
        micro = source.micro_batch(batch, case.multiple)
    copies = case.layout.dp * (case.layout.pp if case.layout.vpp > 1 else 1)
    whole = Batch(batch, (micro,) * copies)
    case.validate(truth, (whole,))

    yardstick = source.yardstick(whole, gradients)
    places, exact, allowed = yardstick.places, yardstick.exact, yardstick.allowed
    counts = _counts(exact, case, truth)
    from mcore_qwen3vl.verify.trace.ranks import Job, trace_on_rank

    choose = partial(_first, allowed=allowed, places=places)
    sent = replace(exact, calls={})
    job = Job(hf, config, mcore, case, places, sent, choose)
    found = run_layout(
        trace_on_rank, case.layout.world_size, job, timeout=timeout, device=case.device
    )
    measured = merge(rank.measured for rank in found)
    result = _result(hf, mcore, case, micro, measured, allowed, counts, places)
    first = _first(measured, allowed=allowed, places=places)
    if first is not None:
        from mcore_qwen3vl.verify.trace.causes import Scene, find_cause

        result.first = next(f for f in result.findings if (f.part, f.name) == first)
        scene = Scene.of(hf, config, case, yardstick, first, found)
        result.cause = find_cause(scene)
    return result


def _config_folder(mcore: Path) -> Path:
    from mcore_qwen3vl.converters.torch_dist.paths import hf_folder

    return hf_folder(mcore)


SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
    "moe_layers",
)


def _check_same_shape(truth: Architecture, examined: Architecture) -> None:
    """Values can be compared only between models of one shape."""
    for name in SHAPES:
        expected, found = getattr(truth, name), getattr(examined, name)
        if expected != found:
            raise BadInput(
                f"The two models cannot be compared place by place: {name} is {expected} in the "
                f"Hugging Face checkpoint and {found} in the Megatron-Core one. Convert again from "
                "this Hugging Face checkpoint."
            )


def _allowed(rounded: Recording, exact: Recording) -> Expectations:
    """What float32 itself does at each place, times `MARGIN`."""
    pairs: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = [
        (ACTIVATIONS, rounded.values, exact.values),
        (SLOPES, rounded.gradients, exact.gradients),
        (GRADIENTS, rounded.expected.gradients, exact.expected.gradients),
        ("logits", _ends(rounded.expected.logits), _ends(exact.expected.logits)),
        ("loss", _ends(rounded.expected.losses), _ends(exact.expected.losses)),
    ]
    allowed: Expectations = {}
    for part, ours, theirs in pairs:
        for name, expected in theirs.items():
            error = measure(ours[name], expected).relative
            allowed[part, name] = MARGIN * max(error, EPSILON)
    return allowed


def _ends(values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"all": values[0]}


def _allowance(allowed: Expectations, part: str, name: str) -> float:
    """One expert of a fused tensor has the fused tensor's."""
    return allowed.get((part, name), allowed.get((part, name.partition("[")[0]), 0.0))


def _counts(exact: Recording, case: Case, a: Architecture) -> dict[tuple[str, str], int]:
    """How many values each comparison must have covered."""
    tokens = sum(len(at.sample.input_ids) for at in exact.micro.places)
    counts: dict[tuple[str, str], int] = {}
    for part, values in ((ACTIVATIONS, exact.values), (SLOPES, exact.gradients)):
        for name, value in values.items():
            rows = tokens if value.ndim == 3 else len(value)
            counts[part, name] = rows * value.shape[-1]
    for row in table(a):
        for source in row.sources:
            label = source.name if source.index is None else f"{source.name}[{source.index}]"
            size = 1
            for length in source.piece_shape:
                size *= length
            counts[WEIGHTS, label] = size
            if case.gradients:
                counts[GRADIENTS, label] = size
    copies = len(exact.expected.batch.micro_batches)
    counts["logits", "all"] = copies * tokens * a.vocab_size
    counts["loss", "all"] = copies * tokens
    if case.layout.tp > a.num_key_value_heads:  # ranks share a head and have parts of its gradient
        for key in [k for k in counts if k[0] == SLOPES and k[1].endswith("k_norm")]:
            del counts[key]
    if case.spec == "te":  # fused into the linear layer that follows
        fused = ("input_layernorm", "post_attention_layernorm")
        for key in [k for k in counts if k[0] in (ACTIVATIONS, SLOPES) and k[1].endswith(fused)]:
            del counts[key]
    return counts


def _order(places: list[Place]) -> list[tuple[str, str]]:
    """Where to look first: forward along the data path, then backward against it."""
    forward = [(ACTIVATIONS, place.name) for place in places]
    backward = [(SLOPES, place.name) for place in reversed(places)]
    return [*forward, ("logits", "all"), ("loss", "all"), *backward]


def _first(
    measured: Measurements, *, allowed: Expectations, places: list[Place]
) -> tuple[str, str] | None:
    """The first comparison out of bounds; weights alone are no place on the data path."""
    gradients = [key for key in measured if key[0] == GRADIENTS]
    for part, name in [*_order(places), *gradients]:
        one = measured.get((part, name))
        if one and one.relative > _allowance(allowed, part, name):
            return part, name
    return None


def _margins(measured: Measurements, allowed: Expectations) -> dict[tuple[str, str], float]:
    """Error over the rounding that is expected, 1 meaning the same."""
    return {
        (part, name): MARGIN * one.relative / allowance
        for (part, name), one in measured.items()
        if (allowance := _allowance(allowed, part, name))
    }


def _result(
    hf: Path,
    mcore: Path | None,
    case: Case,
    micro: MicroBatch,
    measured: Measurements,
    allowed: Expectations,
    counts: dict[tuple[str, str], int],
    places: list[Place],
) -> Trace:
    examined = mcore.name if mcore else f"{hf.name} loaded directly"
    facts: dict[str, Any] = {
        "layout": str(case.layout),
        "spec": case.spec,
        "dtype": "float32, judged by Hugging Face in float64",
        "tokens": int(micro.input_ids.numel()),
        "images and videos": 0 if micro.visual is None else len(micro.visual.grid_thw),
    }
    result = Trace(f"{hf.name}: trace of {examined} at {case}", facts)
    result.margins = _margins(measured, allowed)
    order = [key for key in _order(places) if key in measured or key in counts]
    rest = [key for key in {**counts, **measured} if key not in set(order) and key[0] != "frozen"]
    for part, name in dict.fromkeys([*order, *rest]):
        one = measured.get((part, name), Measurement())
        tolerance = _allowance(allowed, part, name)
        result.findings.append(Finding(part, name, one, tolerance, counts.get((part, name))))
    return result
