"""Experiments on correct weights and wrong outputs: of a layer, or of vision features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.rope import rope_frequencies
from mcore_qwen3vl.verify.trace.divergence import Cause, Divergence
from mcore_qwen3vl.verify.trace.probe_points import TEXT, VISUAL, ProbePoint, cosine_and_sine
from mcore_qwen3vl.verify.trace.recording import replay

EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5)
"""Epsilons of other models' norms, tried beside that of the examined config."""

BASES = (1e4, 5e5, 1e6, 5e6)
"""Rotary bases of other models, tried beside that of the examined config."""


def find_norm(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether the norm is missing or has another epsilon."""
    calls = divergence.recording.calls[point.module]
    inputs = divergence.recording.assemble(point, [args[0] for args, _, _ in calls])
    yield divergence.test("missing norm", f"{point.name} passes its input on unchanged.", inputs)
    module = divergence.model.get_submodule(point.module)
    attribute = "eps" if hasattr(module, "eps") else "variance_epsilon"
    note = divergence.config_note("rms_norm_eps")
    what = f"to the mean square where the model adds {getattr(module, attribute):g}.{note}"
    for epsilon in (divergence.examined.rms_norm_eps, *EPSILONS):
        with _changed(module, attribute, epsilon):
            outcome = replay(divergence.model, divergence.recording, point)
        yield divergence.test("norm epsilon", f"{point.name} adds {epsilon:g} {what}", outcome)


def find_rotary(divergence: Divergence, _: ProbePoint) -> Iterator[Cause | None]:
    """Compute the tables with one of base, axes and positions changed at a time."""
    right, micro = divergence.architecture, divergence.recording.micro
    positions = micro.position_ids.flatten(1)[:, divergence.rows].float()  # (3, T)
    axes = _interleaved(right.mrope_section)

    def test(
        kind: str,
        explanation: str,
        base: float = right.rope_theta,
        axes: str = axes,
        positions: Tensor = positions,
    ) -> Cause | None:
        rows = positions[["thw".index(axis) for axis in axes]].T
        # In float32, because Hugging Face computes them so whatever the model's dtype.
        frequencies, factor = rope_frequencies(right, base)
        angles = (rows * frequencies).repeat(1, 2)  # (T, D)
        tables = cosine_and_sine((angles.cos(), angles.sin())) * factor
        return divergence.test(kind, explanation, tables)

    note = divergence.config_note("rope_theta")
    for base in (divergence.examined.rope_theta, *BASES):
        what = f"The angles are those of base {base:,.0f}; the model's is {right.rope_theta:,.0f}."
        yield test("rotary base", what + note, base=base)
    note = divergence.config_note("mrope_section")
    chunks = "".join(axis * count for axis, count in zip("thw", right.mrope_section, strict=True))
    examined = _interleaved(divergence.examined.mrope_section)
    for kind, other in (("mrope section", examined), ("mrope interleaving", chunks)):
        what = f"The axes of the frequencies are {other} instead of {axes}.{note}"
        yield test(kind, what, axes=other)
    counted = (divergence.rows % micro.input_ids.shape[1]).float().expand(3, -1)
    what = "The positions are counted token by token on all three axes, as for text alone."
    yield test("position ids", what, positions=counted)


def _interleaved(section: Sequence[int]) -> str:
    """Return the axes in the order of HF ``apply_interleaved_mrope``: t h w t h w … t t."""
    axes = ["t"] * sum(section)
    for axis in (1, 2):
        for place in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[place] = "thw"[axis]
    return "".join(axes)


def find_attention(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test for a missing causal mask or rotary embedding, and for another softmax scale."""
    a = divergence.architecture
    per_head = a.hidden_size // a.num_attention_heads
    module: Any = divergence.model.get_submodule(point.module.rpartition(".")[0])
    unmasked, right = {"attention_mask": None}, module.scaling
    experiments: tuple[tuple[str, str, dict[str, Any], float], ...] = (
        ("causal mask", "Every token sees those after it.", unmasked, right),
        ("rotary not applied", "Queries and keys are not rotated.", {"rotated": False}, right),
        ("softmax scale", "Scores are not scaled.", {}, 1.0),
        ("softmax scale", "Scores are scaled by 1 / sqrt(hidden / heads).", {}, per_head**-0.5),
    )
    for kind, explanation, changes, scale in experiments:
        with _changed(module, "scaling", scale):
            outcome = _attend(divergence, point, module, **changes)
        yield divergence.test(kind, explanation, outcome)


@torch.no_grad()
def _attend(
    divergence: Divergence, point: ProbePoint, module: Any, rotated: bool = True, **changes: None
) -> Tensor:
    """Call the attention module again and return the input of its output projection."""
    kept: list[Tensor] = []
    hook = module.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    try:
        for args, kwargs, _ in divergence.recording.calls[point.module.rpartition(".")[0]]:
            cosine, sine = kwargs["position_embeddings"]
            if not rotated:
                cosine, sine = torch.ones_like(cosine), torch.zeros_like(sine)
            module(*args, **{**kwargs, "position_embeddings": (cosine, sine), **changes})
    finally:
        hook.remove()
    return divergence.recording.assemble(point, kept)


def find_router(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test for another number of experts, another score function, and a tie."""
    calls = divergence.recording.calls[point.module]
    logits = divergence.recording.assemble(point, [output[0] for _, _, output in calls])
    logits = divergence.select(logits)
    right = divergence.architecture.num_experts_per_tok
    count = int((divergence.actual != 0).sum(1).median())
    softmax, sigmoid = logits.softmax(1), logits.sigmoid()
    ways = (
        ("router top-k", f"{count} experts a token are chosen instead of {right}", softmax, 1),
        ("router scores", "the chosen experts' weights do not add up to 1", softmax, 0),
        ("router scores", "a sigmoid replaces the softmax", sigmoid, 1),
        ("router scores", "a sigmoid replaces the softmax, not normalised", sigmoid, 0),
    )
    note = divergence.config_note("num_experts_per_tok")
    for kind, what, scores, normalised in ways:
        top = scores.topk(count, dim=1)
        values = top.values / top.values.sum(1, keepdim=True) if normalised else top.values
        outcome = torch.zeros_like(scores).scatter(1, top.indices, values)
        yield divergence.test(kind, f"At {point.name} {what}.{note}", outcome)
    yield _near_tie(divergence, logits, right)


def _near_tie(divergence: Divergence, logits: Tensor, count: int) -> Cause | None:
    """Test whether the last chosen and the first rejected expert are closer than rounding."""
    differ = ((divergence.actual != 0) != (divergence.expected != 0)).any(1)
    ranked = logits[differ].sort(dim=1, descending=True).values
    gaps = ranked[:, count - 1] - ranked[:, count]
    scale = float(logits.abs().max())
    if not len(gaps) or float(gaps.max()) > divergence.tolerance * scale:
        return None
    return Cause(
        "router tie",
        f"{len(gaps)} tokens choose another expert at {divergence.name} because two experts score "
        f"alike (at most {float(gaps.max()):.1e} apart): rounding decides, not a mistake.",
        f"Logits reach {scale:.2g} and may be off by {divergence.tolerance:.1e} of that.",
    )


def find_lora(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether the adapter is left out, or multiplied by another number than alpha / r."""
    factors = {} if divergence.adapter is None else divergence.adapter.factors
    scalings = [f.scaling for n, f in factors.items() if n.startswith(f"{point.module}.")]
    if point.side == "input" or not scalings:
        return
    parameters = divergence.model.get_submodule(point.module).named_parameters()
    zeros = {name: torch.zeros_like(p) for name, p in parameters if "lora_B" in name}
    base = divergence.select(replay(divergence.model, divergence.recording, point, **zeros))
    what = f"{point.name} computes what the base model does: its adapter is left out."
    yield divergence.test("adapter not applied", what, base)
    if len(scalings) == 1:
        # The least-squares factor by which mcore has the adapter's part.
        right, actual = divergence.expected - base, divergence.actual - base
        ratio = float((right * actual).sum() / right.square().sum())
        factor = f"{ratio * scalings[0]:.6g} instead of {scalings[0]:.6g}"
        what = f"The adapter of {point.name} is multiplied by {factor}."
        yield divergence.test("adapter scaling", what, base + ratio * right)


@contextmanager
def _changed(module: Any, name: str, value: float) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, right)


MERGERS = f"{VISUAL}.deepstack_merger_list"


def find_fusion(divergence: Divergence, _: ProbePoint) -> Iterator[Cause | None]:
    """Test whether placeholders hold no feature, or one that belongs to another placeholder."""
    text = divergence.select(divergence.recording.values[f"{TEXT}.embed_tokens"])
    what = "Placeholders keep their text embeddings: no visual feature was put in."
    yield divergence.test("features not fused", what, text)
    yield _reordered(divergence, "feature order", text, f"{VISUAL}.merger", add=False)


def find_deepstack(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether a decoder layer adds no features, another layer's, or its own out of order."""
    if divergence.recording.micro.visual is None:
        return
    layer = int(point.name.rpartition(".")[2])
    calls = divergence.recording.calls[point.name]
    before = divergence.recording.assemble(point, [output for _, _, output in calls])
    before = divergence.select(before)
    count = len(divergence.architecture.vision.deepstack_visual_indexes)
    if layer < count:
        what = f"No DeepStack features are added after decoder layer {layer}."
        yield divergence.test("missing DeepStack", what, before)
    for other in range(count):
        what = f"After decoder layer {layer} the features of DeepStack merger {other} are added."
        features = divergence.recording.values[f"{MERGERS}.{other}"]
        added = _placed(divergence, before, features, add=True)
        yield divergence.test("DeepStack layer", what, added)
    if layer < count:
        yield _reordered(divergence, "DeepStack order", before, f"{MERGERS}.{layer}", add=True)


@torch.no_grad()
def find_merger(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether a DeepStack merger is fed by another block than the config says."""
    number = int(point.name.rpartition(".")[2])
    vision = divergence.architecture.vision
    right = vision.deepstack_visual_indexes[number]
    merger = divergence.model.get_submodule(point.name)
    note = divergence.config_note("vision.deepstack_visual_indexes")
    for block in range(vision.depth):
        yield divergence.test(
            "DeepStack layer",
            f"DeepStack merger {number} is fed by vision block {block} instead of {right}.{note}",
            merger(divergence.recording.values[f"{VISUAL}.blocks.{block}"]),
        )


def _placed(divergence: Divergence, rows: Tensor, features: Tensor, *, add: bool) -> Tensor:
    """Put `features` (N, H) at the placeholders of `rows` (rows, H), or add them there."""
    micro = divergence.recording.micro
    assert micro.visual is not None  # without images no features differ
    whole = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    whole[divergence.rows] = rows
    put = whole.index_add_ if add else whole.index_copy_
    return put(0, micro.visual.token_index, features)[divergence.rows]


def _reordered(
    divergence: Divergence, kind: str, rows: Tensor, merger: str, *, add: bool
) -> Cause | None:
    """Test the order in which each placeholder gets the feature nearest to mcore's value."""
    micro = divergence.recording.micro
    if micro.visual is None:
        return None
    features = divergence.recording.values[merger]
    whole = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    whole[divergence.rows] = divergence.actual - rows if add else divergence.actual
    nearest = torch.cdist(whole[micro.visual.token_index], features).argmin(1)
    moved = torch.nonzero(nearest != torch.arange(len(nearest))).flatten().tolist() or [0]
    return divergence.test(
        kind,
        f"{len(moved)} of {len(nearest)} placeholders are given another's feature: number "
        f"{moved[0]} has that of number {int(nearest[moved[0]])}.",
        _placed(divergence, rows, features[nearest], add=add),
    )
