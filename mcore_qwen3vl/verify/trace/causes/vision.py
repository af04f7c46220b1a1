"""The vision tower with the right weights and a wrong result."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.places import VISUAL
from mcore_qwen3vl.verify.trace.result import Cause


@torch.no_grad()
def find_vision_cause(scene: Scene) -> Cause | None:
    """A DeepStack merger that is fed by another block than the config says."""
    prefix = f"{VISUAL}.deepstack_merger_list."
    if scene.forward is None or not scene.name.startswith(prefix):
        return None
    number = int(scene.name.removeprefix(prefix))
    right = scene.truth.vision.deepstack_visual_indexes[number]
    merger = scene.model.get_submodule(scene.name)
    for block in range(scene.truth.vision.depth):
        outcome: Tensor = merger(scene.recording.values[f"{VISUAL}.blocks.{block}"])
        if block != right and scene.explains(outcome):
            indexes = list(scene.examined.vision.deepstack_visual_indexes)
            says = (
                f" The examined checkpoint's config gives deepstack_visual_indexes as {indexes}."
                if indexes != list(scene.truth.vision.deepstack_visual_indexes)
                else ""
            )
            return Cause(
                "DeepStack layer",
                f"DeepStack merger {number} is fed by vision block {block} instead of {right}."
                f"{says}",
                scene.evidence(f"The merger on block {block}'s output", outcome),
            )
    return None
