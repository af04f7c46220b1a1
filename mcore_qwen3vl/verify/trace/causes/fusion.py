"""Visual features that are right, and do not arrive where they should."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.places import TEXT, VISUAL
from mcore_qwen3vl.verify.trace.result import Cause


def find_fusion_cause(scene: Scene) -> Cause | None:
    """Features at the placeholders' embeddings: none, or others."""
    if scene.forward is None or scene.name != f"{TEXT}.inputs_embeds":
        return None
    text = scene.value(f"{TEXT}.embed_tokens")
    if scene.explains(text):
        return Cause(
            "features not fused",
            "Placeholders keep their text embeddings: no visual feature was put in.",
            scene.evidence("The text embeddings alone", text),
        )
    features = scene.recording.values[f"{VISUAL}.merger"]
    moved = _reordered(scene, text, features, add=False)
    return moved and Cause("feature order", *moved)


def find_deepstack_cause(scene: Scene) -> Cause | None:
    """Features added after a decoder layer: none, those of another layer, or in another order."""
    match = re.fullmatch(rf"{re.escape(TEXT)}\.layers\.(\d+)", scene.name)
    if scene.forward is None or match is None:
        return None
    layer = int(match[1])
    calls = scene.recording.calls[scene.name][: len(scene.recording.micro.places)]
    without = scene.recording.assemble(scene.forward, [output for _, _, output in calls])
    without = without.flatten(0, -2)[scene.rows]
    count = len(scene.truth.vision.deepstack_visual_indexes)
    if layer < count and scene.explains(without):
        return Cause(
            "missing DeepStack",
            f"No DeepStack features are added after decoder layer {layer}.",
            scene.evidence("The layer's output with nothing added", without),
        )
    for other in range(count):
        features = scene.recording.values[f"{VISUAL}.deepstack_merger_list.{other}"]
        outcome = _placed(scene, without, features, add=True)
        if other != layer and scene.explains(outcome):
            return Cause(
                "DeepStack layer",
                f"After decoder layer {layer} the features of DeepStack merger {other} are added.",
                scene.evidence("Those features", outcome),
            )
    if layer < count:
        features = scene.recording.values[f"{VISUAL}.deepstack_merger_list.{layer}"]
        moved = _reordered(scene, without, features, add=True)
        return moved and Cause("DeepStack order", *moved)
    return None


def _placed(scene: Scene, rows: Tensor, features: Tensor, *, add: bool) -> Tensor:
    """`rows` with `features` (N, H) at, or added to, the placeholders."""
    visual = scene.recording.micro.visual
    if visual is None:
        return rows
    whole = rows.new_zeros(scene.recording.micro.input_ids.numel(), rows.shape[1])
    whole[scene.rows] = rows
    if add:
        whole.index_add_(0, visual.token_index, features)
    else:
        whole.index_copy_(0, visual.token_index, features)
    return whole[scene.rows]


def _reordered(
    scene: Scene, rows: Tensor, features: Tensor, *, add: bool
) -> tuple[str, str] | None:
    """Explanation and evidence if the right features are at the wrong placeholders."""
    visual = scene.recording.micro.visual
    if visual is None:
        return None
    whole = scene.expected.new_zeros(scene.recording.micro.input_ids.numel(), rows.shape[1])
    whole[scene.rows] = scene.actual - rows if add else scene.actual
    found = whole[visual.token_index]  # (N, H): what was put at each placeholder
    nearest = torch.cdist(found, features).argmin(1)
    outcome = _placed(scene, rows, features[nearest], add=add)
    if not scene.explains(outcome):
        return None
    moved = torch.nonzero(nearest != torch.arange(len(nearest))).squeeze(1)
    first = int(moved[0]) if len(moved) else 0
    return (
        f"{len(moved)} of {len(nearest)} placeholders are given another's feature: number {first} "
        f"has that of number {int(nearest[first])}.",
        scene.evidence("The features in that order", outcome),
    )
