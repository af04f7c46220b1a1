"""Attention whose queries, keys and values are right and whose outcome is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.scene import Scene
from mcore_qwen3vl.verify.trace.result import Cause


def find_attention_cause(scene: Scene) -> Cause | None:
    """No causal mask, no rotary embedding, another scale."""
    place = scene.forward
    if place is None or not place.name.endswith("self_attn.o_proj:input"):
        return None
    module: Any = scene.model.get_submodule(place.module.rpartition(".")[0])
    right = module.scaling
    per_head = scene.truth.hidden_size // scene.truth.num_attention_heads
    scales = {1.0: "no scale", per_head**-0.5: "1 / sqrt(hidden_size / heads)"}
    experiments = [
        ("causal mask", "Every token sees those after it.", {"attention_mask": None}, right),
        (
            "rotary not applied",
            "Queries and keys were not turned.",
            {"position_embeddings": None},
            right,
        ),
        *(
            ("softmax scale", f"Scores are scaled with {name}.", {}, scale)
            for scale, name in scales.items()
        ),
    ]
    for kind, sentence, changes, scale in experiments:
        module.scaling = scale
        try:
            outcome = _attend(scene, module, changes)
        finally:
            module.scaling = right
        if scene.explains(outcome):
            return Cause(kind, sentence, scene.evidence("Attention computed that way", outcome))
    return None


@torch.no_grad()
def _attend(scene: Scene, module: Any, changes: dict[str, Any]) -> Tensor:
    """What goes into the output projection when the module is called with `changes`."""
    place = scene.place
    assert place is not None
    kept: list[Tensor] = []
    hook = module.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    name = place.module.rpartition(".")[0]
    count = len(scene.recording.micro.places)
    try:
        for args, kwargs, _ in scene.recording.calls[name][:count]:
            changed = {**kwargs, **changes}
            if changed.get("position_embeddings", ()) is None:
                cosine, sine = kwargs["position_embeddings"]
                unturned = torch.ones_like(cosine), torch.zeros_like(sine)
                changed["position_embeddings"] = unturned
            module(*args, **changed)
    finally:
        hook.remove()
    return scene.recording.assemble(place, kept)
