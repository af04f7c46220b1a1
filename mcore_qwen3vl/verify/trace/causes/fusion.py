"""Visual features that are right, and do not arrive where they should."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import TEXT, VISUAL
from mcore_qwen3vl.verify.trace.result import Cause


def find_fusion_cause(divergence: Divergence) -> Cause | None:
    """Features at the placeholders' embeddings: none, or others."""
    if divergence.forward is None or divergence.name != f"{TEXT}.inputs_embeds":
        return None
    text = divergence.value(f"{TEXT}.embed_tokens")
    if divergence.explains(text):
        return Cause(
            "features not fused",
            "Placeholders keep their text embeddings: no visual feature was put in.",
            divergence.evidence("The text embeddings alone", text),
        )
    features = divergence.recording.values[f"{VISUAL}.merger"]
    moved = _reordered(divergence, text, features, add=False)
    return moved and Cause("feature order", *moved)


def find_deepstack_cause(divergence: Divergence) -> Cause | None:
    """Features added after a decoder layer: none, those of another layer, or in another order."""
    match = re.fullmatch(rf"{re.escape(TEXT)}\.layers\.(\d+)", divergence.name)
    if divergence.forward is None or match is None:
        return None
    layer = int(match[1])
    calls = divergence.recording.calls[divergence.name][: len(divergence.recording.micro.spans)]
    without = divergence.recording.assemble(divergence.forward, [output for _, _, output in calls])
    without = without.flatten(0, -2)[divergence.rows]
    count = len(divergence.architecture.vision.deepstack_visual_indexes)
    if layer < count and divergence.explains(without):
        return Cause(
            "missing DeepStack",
            f"No DeepStack features are added after decoder layer {layer}.",
            divergence.evidence("The layer's output with nothing added", without),
        )
    for other in range(count):
        features = divergence.recording.values[f"{VISUAL}.deepstack_merger_list.{other}"]
        outcome = _placed(divergence, without, features, add=True)
        if other != layer and divergence.explains(outcome):
            return Cause(
                "DeepStack layer",
                f"After decoder layer {layer} the features of DeepStack merger {other} are added.",
                divergence.evidence("Those features", outcome),
            )
    if layer < count:
        features = divergence.recording.values[f"{VISUAL}.deepstack_merger_list.{layer}"]
        moved = _reordered(divergence, without, features, add=True)
        return moved and Cause("DeepStack order", *moved)
    return None


def _placed(divergence: Divergence, rows: Tensor, features: Tensor, *, add: bool) -> Tensor:
    """`rows` with `features` (N, H) at, or added to, the placeholders."""
    visual = divergence.recording.micro.visual
    if visual is None:
        return rows
    whole = rows.new_zeros(divergence.recording.micro.input_ids.numel(), rows.shape[1])
    whole[divergence.rows] = rows
    if add:
        whole.index_add_(0, visual.token_index, features)
    else:
        whole.index_copy_(0, visual.token_index, features)
    return whole[divergence.rows]


def _reordered(
    divergence: Divergence, rows: Tensor, features: Tensor, *, add: bool
) -> tuple[str, str] | None:
    """Explanation and evidence if the right features are at the wrong placeholders."""
    visual = divergence.recording.micro.visual
    if visual is None:
        return None
    whole = divergence.expected.new_zeros(
        divergence.recording.micro.input_ids.numel(), rows.shape[1]
    )
    whole[divergence.rows] = divergence.actual - rows if add else divergence.actual
    found = whole[visual.token_index]  # (N, H): what was put at each placeholder
    nearest = torch.cdist(found, features).argmin(1)
    outcome = _placed(divergence, rows, features[nearest], add=add)
    if not divergence.explains(outcome):
        return None
    moved = torch.nonzero(nearest != torch.arange(len(nearest))).squeeze(1)
    first = int(moved[0]) if len(moved) else 0
    return (
        f"{len(moved)} of {len(nearest)} placeholders are given another's feature: number {first} "
        f"has that of number {int(nearest[first])}.",
        divergence.evidence("The features in that order", outcome),
    )
