"""Hugging Face's side of a trace: its values at every probe point, and their rounding.

A probe point is the output (or the input) of one Hugging Face module, and has that module's name.
Probe points are in the order of the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.verification.measurement import EPSILON, measure
from mcore_qwen3vl.verification.parity.case import GlobalBatch, MicroBatch, build_batch
from mcore_qwen3vl.verification.parity.reference import Expected, Reference, ReferenceCheckpoint

Rows = Literal["tokens", "patches", "features"]
"""What the rows at a probe point stand for: tokens (B, S), patches (P), merged features (N)."""

VISUAL = "model.visual"
TEXT = "model.language_model"
ATTENTION = (
    tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
    "self_attn.o_proj",
)
DELTA_NET = (
    tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    "linear_attn.out_proj",
)
"""The modules with which a layer's attention or gated delta net begins, and the one at its end."""

ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
GRADIENTS = "gradients"
WEIGHTS = "weights"
"""The parts of a trace."""


@dataclass(frozen=True)
class ProbePoint:
    """One probe point on the data path."""

    name: str  # HF module name, with ``:input`` for the input of a module whose output is one too
    rows: Rows
    module: str  # HF module with the hook
    side: Literal["input", "output"] = "output"  # which of the module's is compared
    # It returns the tensor to compare from that input or output; its gradient is compared too.
    pick: Callable[[Any], Tensor] = lambda value: value
    # It brings that tensor, or its gradient, into the compared form, given the whole output.
    spread: Callable[[Tensor, Any], Tensor] = lambda tensor, value: tensor


def probe_points(architecture: Architecture) -> list[ProbePoint]:
    """Return all probe points of a model, in the order of the data."""
    vision = _vision_points(architecture) if architecture.has_vision else ()
    return [*vision, *_text_points(architecture)]


def cosine_and_sine(tables: tuple[Tensor, Tensor]) -> Tensor:
    """Join rotary tables into one tensor: (..., D) twice to (..., 2 * D)."""
    return torch.cat(tables, dim=-1)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states that a module was called with."""
    return args[0] if args else kwargs["hidden_states"]


def _vision_points(architecture: Architecture) -> Iterator[ProbePoint]:
    def visual_point(name: str, rows: Rows = "patches", **kwargs: Any) -> ProbePoint:
        return ProbePoint(f"{VISUAL}.{name}", rows, f"{VISUAL}.{name}", **kwargs)

    yield visual_point("patch_embed")
    yield visual_point("pos_embed")
    yield visual_point("rotary_pos_emb", pick=cosine_and_sine)
    deepstack = architecture.vision.deepstack_visual_indexes
    for i in range(architecture.vision.depth):
        for child in ("norm1", "attn.qkv", "attn", "norm2", "mlp"):
            yield visual_point(f"blocks.{i}.{child}")
        yield visual_point(f"blocks.{i}")
        if i in deepstack:
            yield visual_point(f"deepstack_merger_list.{deepstack.index(i)}", "features")
    yield visual_point("merger", "features")


def _text_points(architecture: Architecture) -> Iterator[ProbePoint]:
    def token_point(name: str, module: str = "", **kwargs: Any) -> ProbePoint:
        return ProbePoint(name, "tokens", module or name, **kwargs)

    yield token_point(f"{TEXT}.embed_tokens")
    yield token_point(f"{TEXT}.inputs_embeds", module=f"{TEXT}.layers.0", side="input")
    yield token_point(f"{TEXT}.rotary_emb", pick=cosine_and_sine)
    for i in range(architecture.num_hidden_layers):
        layer = f"{TEXT}.layers.{i}"
        yield token_point(f"{layer}.input_layernorm")
        inputs, projection = ATTENTION
        if architecture.delta_net_layers[i]:
            inputs, projection = DELTA_NET
        for child in inputs:
            yield token_point(f"{layer}.{child}")
        projection = f"{layer}.{projection}"
        yield token_point(f"{projection}:input", module=projection, side="input")
        yield token_point(projection)
        yield token_point(f"{layer}.post_attention_layernorm")
        if architecture.moe_layers[i]:
            yield token_point(
                f"{layer}.mlp.gate", pick=lambda out: out[1], spread=_scatter_over_experts
            )
        if not architecture.moe_layers[i] or architecture.shared_expert_intermediate_size:
            mlp = f"{layer}.mlp.shared_expert" if architecture.moe_layers[i] else f"{layer}.mlp"
            for child in ("gate_proj", "up_proj", "down_proj"):
                yield token_point(f"{mlp}.{child}")
        if architecture.moe_layers[i]:
            yield token_point(experts_point(architecture, layer))
        # DeepStack features are added between one layer and the next.
        last = i == architecture.num_hidden_layers - 1
        follows = f"{TEXT}.norm" if last else f"{TEXT}.layers.{i + 1}"
        yield token_point(layer, module=follows, side="input")
    yield token_point(f"{TEXT}.norm")
    yield token_point("lm_head")


def experts_point(architecture: Architecture, layer: str) -> str:
    """Return the probe point of what a MoE layer gives, a shared expert's part included."""
    return (
        f"{layer}.mlp" if architecture.shared_expert_intermediate_size else f"{layer}.mlp.experts"
    )


def _scatter_over_experts(scores: Tensor, outputs: Any) -> Tensor:
    """Scatter the weights of the chosen experts (T, k) to (T, E), zero for the others."""
    logits, _, chosen = outputs
    return torch.zeros_like(logits, dtype=scores.dtype).scatter(1, chosen, scores)


class Tolerances(dict[tuple[str, str], float]):
    """Largest relative error allowed, by part and name."""

    def __missing__(self, key: tuple[str, str]) -> float:
        """Return the fused tensor's tolerance for one expert of it; 0 for what is exact."""
        part, name = key
        return self.get((part, name.partition("[")[0]), 0.0)


@dataclass
class Recording:
    """Values of one micro-batch at every probe point."""

    points: list[ProbePoint]  # in the order of the data
    micro: MicroBatch
    values: dict[str, Tensor]  # by probe point: (B, S, W), zero at padding; (P, W) or (N, W)
    gradients: dict[str, Tensor]  # the loss's, in the same form; empty if not asked for
    expected: Expected  # logits, losses and gradients of the parameters
    # Largest relative errors that rounding explains, of the values in float64.
    tolerances: Tolerances = field(default_factory=Tolerances)

    def parts(self) -> dict[str, Mapping[str, Tensor]]:
        """Return values by part and name; of logits and loss those of the first micro-batch."""
        return {
            ACTIVATIONS: self.values,
            ACTIVATION_GRADIENTS: self.gradients,
            GRADIENTS: self.expected.gradients,
            "logits": {"all": self.expected.logits[0]},
            "loss": {"all": self.expected.losses[0]},
        }

    def assemble(self, point: ProbePoint, outputs: Sequence[Tensor]) -> Tensor:
        """Join the values of a module's calls, in their order, into those of the micro-batch.

        Visual rows are those of images first, then of videos, as in :class:`.VisualInputs`.
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


def record_reference(
    reference: Reference,
    points: list[ProbePoint],
    batch: GlobalBatch,
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
            module = reference.network.get_submodule(reference.names.stored_name(point.module))
            hook = module.register_forward_hook(partial(keep_value, point), with_kwargs=True)
            stack.callback(hook.remove)
        expected = reference.compute_expected(batch, gradients=gradients)
    micro, copies = batch.micro_batches[0], len(batch.micro_batches)
    recording = Recording(points, micro, {}, {}, expected)
    for point in points:
        if values := values_of.get(point.name):
            first = values[: len(values) // copies]
            recording.values[point.name] = recording.assemble(point, first)
            if by_call := gradients_of.get(point.name):
                # The loss does not depend on every call, and then the call has no gradient.
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

    def recording(self, batch: GlobalBatch, gradients: bool) -> Recording:
        """Record `batch`, copies of one micro-batch, in float64; in float32 for the tolerances."""
        # A recording keeps its micro-batch alive, so the id stays taken.
        key = (id(batch.micro_batches[0]), len(batch.micro_batches), gradients)
        if key not in self._recordings:
            points = probe_points(self.architecture)
            rounded = record_reference(self.model(), points, batch, gradients=gradients)
            exact = record_reference(self.model(torch.float64), points, batch, gradients=gradients)
            exact.tolerances = _tolerances(rounded, exact)
            self._recordings[key] = exact
        return self._recordings[key]


def _tolerances(rounded: Recording, exact: Recording) -> Tolerances:
    """Return the rounding error of float32 itself at each probe point, times `MARGIN`."""
    tolerances = Tolerances()
    of_rounded = rounded.parts()
    for part, values in exact.parts().items():
        for name, expected in values.items():
            error = measure(of_rounded[part][name], expected).relative
            tolerances[part, name] = MARGIN * max(error, EPSILON)
    return tolerances
