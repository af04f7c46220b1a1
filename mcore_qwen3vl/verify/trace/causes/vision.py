"""The vision tower with the right weights and a wrong result."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import VISUAL
from mcore_qwen3vl.verify.trace.result import Cause


@torch.no_grad()
def find_vision_cause(divergence: Divergence) -> Cause | None:
    """A DeepStack merger that is fed by another block than the config says."""
    prefix = f"{VISUAL}.deepstack_merger_list."
    if divergence.forward is None or not divergence.name.startswith(prefix):
        return None
    number = int(divergence.name.removeprefix(prefix))
    right = divergence.architecture.vision.deepstack_visual_indexes[number]
    merger = divergence.model.get_submodule(divergence.name)
    for block in range(divergence.architecture.vision.depth):
        outcome: Tensor = merger(divergence.recording.values[f"{VISUAL}.blocks.{block}"])
        if block != right and divergence.explains(outcome):
            indexes = list(divergence.examined.vision.deepstack_visual_indexes)
            says = (
                f" The examined checkpoint's config gives deepstack_visual_indexes as {indexes}."
                if indexes != list(divergence.architecture.vision.deepstack_visual_indexes)
                else ""
            )
            return Cause(
                "DeepStack layer",
                f"DeepStack merger {number} is fed by vision block {block} instead of {right}."
                f"{says}",
                divergence.evidence(f"The merger on block {block}'s output", outcome),
            )
    return None
