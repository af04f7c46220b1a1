"""A router with the right weight that chooses or weighs experts in another way."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.result import Cause


def find_router_cause(scene: Scene) -> Cause | None:
    """Another number of experts, another score function, or a tie that rounding decides."""
    if scene.forward is None or not scene.name.endswith(".mlp.gate"):
        return None
    logits = _logits(scene)
    right = scene.truth.num_experts_per_tok
    chosen = int((scene.actual != 0).sum(1).median())
    softmax = logits.softmax(1)
    ways = [
        ("router top-k", f"{chosen} experts a token are chosen instead of {right}", logits, True),
        ("router scores", "the chosen experts' weights do not add up to 1", softmax, False),
        ("router scores", "a sigmoid takes the place of the softmax", logits.sigmoid(), False),
    ]
    for kind, sentence, scores, renormalise in ways:
        outcome = _weigh(scores, chosen, renormalise)
        if (kind != "router top-k" or chosen != right) and scene.explains(outcome):
            return Cause(
                kind,
                f"At {scene.name} {sentence}.{_config(scene)}",
                scene.evidence("Hugging Face's logits weighed that way", outcome),
            )
    return _near_tie(scene, logits, right)


def _logits(scene: Scene) -> Tensor:
    place = scene.place
    assert place is not None
    calls = scene.recording.calls[place.module][: len(scene.recording.micro.places)]
    whole = scene.recording.assemble(place, [output[0] for _, _, output in calls])
    return whole.flatten(0, -2)[scene.rows]


def _weigh(scores: Tensor, count: int, renormalise: bool) -> Tensor:
    """(T, E): the `count` largest of each row, as they are or with a softmax over them."""
    top = scores.topk(count, dim=1)
    values = top.values.softmax(1) if renormalise else top.values
    return torch.zeros_like(scores).scatter(1, top.indices, values)


def _near_tie(scene: Scene, logits: Tensor, count: int) -> Cause | None:
    """Tokens whose last chosen and first rejected expert are closer than rounding."""
    differ = ((scene.actual != 0) != (scene.expected != 0)).any(1)
    if not bool(differ.any()):
        return None
    ranked = logits.sort(dim=1, descending=True).values
    gaps = (ranked[:, count - 1] - ranked[:, count])[differ]
    scale = logits.abs().max()
    if bool((gaps > scene.tolerance * scale).any()):
        return None
    return Cause(
        "router tie",
        f"{int(differ.sum())} tokens choose another expert at {scene.name} because two experts "
        f"score alike (at most {gaps.max().item():.1e} apart): rounding decides, not a mistake.",
        f"Logits reach {scale.item():.2g} and may be off by {scene.tolerance:.1e} of that.",
    )


def _config(scene: Scene) -> str:
    if scene.examined.num_experts_per_tok == scene.truth.num_experts_per_tok:
        return ""
    count = scene.examined.num_experts_per_tok
    return f" The examined checkpoint's config gives num_experts_per_tok as {count}."
