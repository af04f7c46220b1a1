"""Experiments that find out why a probe point differs.

Everything before the first point out of tolerance agrees, so its inputs are Hugging Face's. An
experiment assumes one mistake and recomputes the point from those inputs. The mistake is the cause
if the outcome is what mcore computed, within the point's rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.attention import rope_frequencies
from mcore_qwen3vl.verify.mistakes import CHANGED, Candidate, mistake
from mcore_qwen3vl.verify.trace.divergence import Cause, Divergence
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    TEXT,
    VISUAL,
    ProbePoint,
    cosine_and_sine,
)
from mcore_qwen3vl.verify.trace.recording import replay

Experiment = Callable[[Divergence, ProbePoint], Iterator[Candidate | Cause]]
"""Yields mistakes to test, and causes that need no test."""

NEAR = 1e-3
"""The largest relative distance from a parallel size at which a ratio is named after it."""

EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5)
"""Epsilons of other models' norms, tried beside that of the examined config."""

BASES = (1e4, 5e5, 1e6, 5e6)
"""Rotary bases of other models, tried beside that of the examined config."""

MERGERS = f"{VISUAL}.deepstack_merger_list"


def find_gradient(divergence: Divergence) -> Iterator[Candidate | Cause]:
    """Test for a missing gradient, or one that is a multiple of the right one."""
    actual, right, name = divergence.actual, divergence.expected, divergence.name
    if divergence.part not in (ACTIVATION_GRADIENTS, GRADIENTS):
        return
    if not bool(actual.any()):
        yield Cause("no gradient", f"No gradient reaches {name}.", "All values are zero.")
        return
    ratio = float((actual * right).sum() / right.square().sum())
    sizes = [(n, s) for n, s in asdict(divergence.case.layout).items() if type(s) is int and s > 1]
    named = [(n.upper(), s) for n, s in sizes] + [(f"1 / {n.upper()}", 1 / s) for n, s in sizes]
    meaning = next((f", which is {n}" for n, s in named if abs(ratio / s - 1) < NEAR), "")
    what = f"The gradient of {name} is {ratio:.6g} times the right one{meaning}."
    yield "gradient scale", what, ratio * right


def find_weight(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate | Cause]:
    """Name the weights of the probe point that differ, and test whether they explain it."""
    changed = {
        name: values
        for name, values in divergence.weights.items()
        if name.startswith(f"{point.module}.") and not torch.equal(values, divergence.stored(name))
    }
    if point.side == "input" or not changed:
        return
    verdicts = {name: mistake(divergence, name, values) for name, values in changed.items()}
    name = min(verdicts, key=lambda n: verdicts[n][0] == CHANGED)
    kind, sentence = verdicts[name]
    parameters = _in_module(divergence, point, changed)
    outcome = replay(divergence.model, divergence.recording, point, **parameters)
    others = f" (as well as {len(changed) - 1} more here)" if len(changed) > 1 else ""
    explanation = f"{name}{others} {sentence}."
    yield kind, explanation, outcome
    still = (
        f"Hugging Face's module with mcore's weight is still {divergence.distance(outcome):.1e} "
        "from mcore's values, so the weight alone does not explain them."
    )
    yield Cause(kind, explanation, still, confirmed=False)


def _in_module(
    divergence: Divergence, point: ProbePoint, changed: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return `changed` by the names of the module in memory, with experts in its layout."""
    module = divergence.model.get_submodule(point.module)
    paths = {parameter: path for path, parameter in module.named_parameters()}
    # PEFT's wrappers keep the adapted parameter one or more levels down.
    bare = {path.replace("base_layer.", ""): path for path in paths.values()}
    inside: dict[str, Tensor] = {}
    for name, value in changed.items():
        own = bare.get(name.removeprefix(f"{point.module}."), "")
        path = paths.get(divergence.trained[name], own) if name in divergence.trained else own
        swap = value.ndim == 3 and divergence.published
        inside[path] = value.transpose(1, 2) if swap else value
    return inside


def find_lora(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate]:
    """Test whether the adapter is left out, or multiplied by another number than alpha / r."""
    factors = {} if divergence.adapter is None else divergence.adapter.factors
    scalings = [f.scaling for n, f in factors.items() if n.startswith(f"{point.module}.")]
    if point.side == "input" or not scalings:
        return
    parameters = divergence.model.get_submodule(point.module).named_parameters()
    zeros = {name: torch.zeros_like(p) for name, p in parameters if "lora_B" in name}
    base = divergence.select(replay(divergence.model, divergence.recording, point, **zeros))
    what = f"{point.name} computes what the base model does: its adapter is left out."
    yield "adapter not applied", what, base
    if len(scalings) == 1:
        # The least-squares factor by which mcore has the adapter's part.
        right, actual = divergence.expected - base, divergence.actual - base
        ratio = float((right * actual).sum() / right.square().sum())
        factor = f"{ratio * scalings[0]:.6g} instead of {scalings[0]:.6g}"
        what = f"The adapter of {point.name} is multiplied by {factor}."
        yield "adapter scaling", what, base + ratio * right


def find_rotary(divergence: Divergence, _: ProbePoint) -> Iterator[Candidate]:
    """Compute the tables with one of base, axes and positions changed at a time."""
    right, examined = divergence.architecture, divergence.examined
    micro = divergence.recording.micro
    given = micro.position_ids.flatten(1)[:, divergence.rows].float()  # (3, T)
    interleaved = _interleaved(right.mrope_section)

    def tables(
        base: float = right.rope_theta, axes: str = interleaved, positions: Tensor = given
    ) -> Tensor:
        rows = positions[["thw".index(axis) for axis in axes]].T
        # In float32, because Hugging Face computes them so whatever the model's dtype.
        frequencies, factor = rope_frequencies(right, base)
        angles = (rows * frequencies).repeat(1, 2)  # (T, D)
        return cosine_and_sine((angles.cos(), angles.sin())) * factor

    note = divergence.config_note("rope_theta")
    for base in (examined.rope_theta, *BASES):
        what = f"The angles are those of base {base:,.0f}; the model's is {right.rope_theta:,.0f}."
        yield "rotary base", what + note, tables(base=base)
    note = divergence.config_note("mrope_section")
    chunks = "".join(axis * count for axis, count in zip("thw", right.mrope_section, strict=True))
    for kind, axes in (
        ("mrope section", _interleaved(examined.mrope_section)),
        ("mrope interleaving", chunks),
    ):
        what = f"The axes of the frequencies are {axes} instead of {interleaved}.{note}"
        yield kind, what, tables(axes=axes)
    counted = (divergence.rows % micro.input_ids.shape[1]).float().expand(3, -1)
    what = "The positions are counted token by token on all three axes, as for text alone."
    yield "position ids", what, tables(positions=counted)


def _interleaved(section: Sequence[int]) -> str:
    """Return the axes in the order of HF ``apply_interleaved_mrope``: t h w t h w … t t."""
    axes = ["t"] * sum(section)
    for axis in (1, 2):
        for place in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[place] = "thw"[axis]
    return "".join(axes)


def find_norm(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate]:
    """Test whether the norm is missing or has another epsilon."""
    module, recording = divergence.model.get_submodule(point.module), divergence.recording
    inputs = recording.assemble(point, [args[0] for args, _, _ in recording.calls[point.module]])
    yield "missing norm", f"{point.name} passes its input on unchanged.", inputs
    attribute = "eps" if hasattr(module, "eps") else "variance_epsilon"
    note = divergence.config_note("rms_norm_eps")
    what = f"to the mean square where the model adds {getattr(module, attribute):g}.{note}"
    for epsilon in (divergence.examined.rms_norm_eps, *EPSILONS):
        with mock.patch.object(module, attribute, epsilon):
            outcome = replay(divergence.model, recording, point)
        yield "norm epsilon", f"{point.name} adds {epsilon:g} {what}", outcome


@torch.no_grad()
def find_attention(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate]:
    """Test for a missing causal mask or rotary embedding, and for another softmax scale."""
    a, recording = divergence.architecture, divergence.recording
    parent = point.module.rpartition(".")[0]
    module: Any = divergence.model.get_submodule(parent)

    def attend(rotated: bool = True, **changes: None) -> Tensor:
        """Call the attention module again and return the input of its output projection."""
        kept: list[Tensor] = []
        hook = module.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        with hook:
            for args, kwargs, _ in recording.calls[parent]:
                tables = kwargs["position_embeddings"]
                if not rotated:
                    tables = (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))
                module(*args, **{**kwargs, "position_embeddings": tables, **changes})
        return recording.assemble(point, kept)

    yield "causal mask", "Every token sees those after it.", attend(attention_mask=None)
    yield "rotary not applied", "Queries and keys are not rotated.", attend(rotated=False)
    per_head = a.hidden_size // a.num_attention_heads
    for what, scale in (
        ("Scores are not scaled.", 1.0),
        ("Scores are scaled by 1 / sqrt(hidden / heads).", per_head**-0.5),
    ):
        with mock.patch.object(module, "scaling", scale):
            outcome = attend()
        yield "softmax scale", what, outcome


def find_router(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate | Cause]:
    """Test for another number of experts, another score function, and a tie."""
    calls = divergence.recording.calls[point.module]
    logits = divergence.recording.assemble(point, [output[0] for _, _, output in calls])
    logits = divergence.select(logits)
    right = divergence.architecture.num_experts_per_tok
    count = int((divergence.actual != 0).sum(1).median())
    softmax, sigmoid = logits.softmax(1), logits.sigmoid()
    note = divergence.config_note("num_experts_per_tok")
    for kind, what, scores, normalised in (
        ("router top-k", f"{count} experts a token are chosen instead of {right}", softmax, True),
        ("router scores", "the chosen experts' weights do not add up to 1", softmax, False),
        ("router scores", "a sigmoid replaces the softmax", sigmoid, True),
        ("router scores", "a sigmoid replaces the softmax, not normalised", sigmoid, False),
    ):
        top = scores.topk(count, dim=1)
        values = top.values / top.values.sum(1, keepdim=True) if normalised else top.values
        outcome = torch.zeros_like(scores).scatter(1, top.indices, values)
        yield kind, f"At {point.name} {what}.{note}", outcome
    # Are the last chosen and the first rejected expert closer than rounding?
    differ = ((divergence.actual != 0) != (divergence.expected != 0)).any(1)
    ranked = logits[differ].sort(dim=1, descending=True).values
    gaps = ranked[:, right - 1] - ranked[:, right]
    scale = float(logits.abs().max())
    if len(gaps) and float(gaps.max()) <= divergence.tolerance * scale:
        yield Cause(
            "router tie",
            f"{len(gaps)} tokens choose another expert at {point.name} because two experts score "
            f"alike (at most {float(gaps.max()):.1e} apart): rounding decides, not a mistake.",
            f"Logits reach {scale:.2g} and may be off by {divergence.tolerance:.1e} of that.",
        )


def find_fusion(divergence: Divergence, _: ProbePoint) -> Iterator[Candidate]:
    """Test whether placeholders hold no feature, or one that belongs to another placeholder."""
    text = divergence.select(divergence.recording.values[f"{TEXT}.embed_tokens"])
    what = "Placeholders keep their text embeddings: no visual feature was put in."
    yield "features not fused", what, text
    yield from _reordered(divergence, "feature order", text, f"{VISUAL}.merger", add=False)


def find_deepstack(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate]:
    """Test whether a decoder layer adds no features, another layer's, or its own out of order."""
    recording, layer = divergence.recording, int(point.name.rpartition(".")[2])
    if recording.micro.visual is None:
        return
    outputs = [output for _, _, output in recording.calls[point.name]]
    before = divergence.select(recording.assemble(point, outputs))
    count = len(divergence.architecture.vision.deepstack_visual_indexes)
    if layer < count:
        what = f"No DeepStack features are added after decoder layer {layer}."
        yield "missing DeepStack", what, before
    for other in range(count):
        what = f"After decoder layer {layer} the features of DeepStack merger {other} are added."
        features = recording.values[f"{MERGERS}.{other}"]
        yield "DeepStack layer", what, _placed(divergence, before, features, add=True)
    if layer < count:
        order = f"{MERGERS}.{layer}"
        yield from _reordered(divergence, "DeepStack order", before, order, add=True)


@torch.no_grad()
def find_merger(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate]:
    """Test whether a DeepStack merger is fed by another block than the config says."""
    number, vision = int(point.name.rpartition(".")[2]), divergence.architecture.vision
    right = vision.deepstack_visual_indexes[number]
    merger = divergence.model.get_submodule(point.name)
    note = divergence.config_note("vision.deepstack_visual_indexes")
    for block in range(vision.depth):
        what = f"DeepStack merger {number} is fed by vision block {block} instead of {right}.{note}"
        outcome = merger(divergence.recording.values[f"{VISUAL}.blocks.{block}"])
        yield "DeepStack layer", what, outcome


def _placed(divergence: Divergence, rows: Tensor, features: Tensor, *, add: bool) -> Tensor:
    """Put `features` (N, H) at the placeholders of `rows` (rows, H), or add them there."""
    micro = divergence.recording.micro
    assert micro.visual is not None  # without images no features differ
    complete = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    complete[divergence.rows] = rows
    put = complete.index_add_ if add else complete.index_copy_
    return put(0, micro.visual.token_index, features)[divergence.rows]


def _reordered(
    divergence: Divergence, kind: str, rows: Tensor, merger: str, *, add: bool
) -> Iterator[Candidate]:
    """Yield the order in which each placeholder gets the feature nearest to mcore's value."""
    micro = divergence.recording.micro
    if micro.visual is None:
        return
    features = divergence.recording.values[merger]
    complete = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    complete[divergence.rows] = divergence.actual - rows if add else divergence.actual
    nearest = torch.cdist(complete[micro.visual.token_index], features).argmin(1)
    moved = torch.nonzero(nearest != torch.arange(len(nearest))).flatten().tolist() or [0]
    what = (
        f"{len(moved)} of {len(nearest)} placeholders are given another's feature: number "
        f"{moved[0]} has that of number {int(nearest[moved[0]])}."
    )
    yield kind, what, _placed(divergence, rows, features[nearest], add=add)


def find_precision(divergence: Divergence, point: ProbePoint) -> Iterator[Cause]:
    """Test whether every value is exactly representable in a half-precision type."""
    values = divergence.actual.float()
    off = divergence.distance(divergence.expected)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = values.numel() and torch.equal(values, values.to(dtype).float())
        if rounded and off <= 64 * torch.finfo(dtype).eps:
            short = str(dtype).removeprefix("torch.")
            yield Cause(
                "dtype",
                f"{point.name} is computed or kept in {short}.",
                f"All {values.numel()} values are exactly {short} numbers, and {off:.1e} off.",
            )


EXPERIMENTS: tuple[tuple[str, Experiment], ...] = (
    (r".*", find_weight),
    (r".*", find_lora),
    (r".*language_model\.rotary_emb", find_rotary),
    (r".*norm\d?", find_norm),
    (r".*self_attn\.o_proj:input", find_attention),
    (r".*mlp\.gate", find_router),
    (r".*inputs_embeds", find_fusion),
    (r".*language_model\.layers\.\d+", find_deepstack),
    (r".*deepstack_merger_list\.\d+", find_merger),
    (r".*", find_precision),
)
"""The experiments in the order in which they are tried, each after a pattern of probe points."""


def find_cause(divergence: Divergence) -> Cause:
    """Return the first cause that explains what mcore computed; ``unknown`` if none does."""
    point, name = divergence.point, divergence.name
    tried = [find_gradient(divergence)]
    if point is not None and divergence.part == ACTIVATIONS:
        tried = [
            find(divergence, point) for place, find in EXPERIMENTS if re.fullmatch(place, name)
        ]
    for experiment in tried:
        for outcome in experiment:
            cause = outcome if isinstance(outcome, Cause) else divergence.test(*outcome)
            if cause is not None:
                return cause
    return Cause(
        "unknown",
        f"The inputs of {name} and its weights agree with Hugging Face's; what it computes from "
        "them does not.",
        f"{len(tried)} kinds of experiments were made; none reproduces what mcore computed.",
        confirmed=False,
    )
