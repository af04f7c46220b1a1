"""Attention whose queries, keys and values are right and whose outcome is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.result import Cause


def find_attention_cause(divergence: Divergence) -> Cause | None:
    """No causal mask, no rotary embedding, another scale."""
    point = divergence.forward
    if point is None or not point.name.endswith("self_attn.o_proj:input"):
        return None
    module: Any = divergence.model.get_submodule(point.module.rpartition(".")[0])
    right = module.scaling
    per_head = divergence.architecture.hidden_size // divergence.architecture.num_attention_heads
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
            outcome = _attend(divergence, module, changes)
        finally:
            module.scaling = right
        if divergence.explains(outcome):
            return Cause(
                kind, sentence, divergence.evidence("Attention computed that way", outcome)
            )
    return None


@torch.no_grad()
def _attend(divergence: Divergence, module: Any, changes: dict[str, Any]) -> Tensor:
    """What goes into the output projection when the module is called with `changes`."""
    point = divergence.point
    assert point is not None
    kept: list[Tensor] = []
    hook = module.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    name = point.module.rpartition(".")[0]
    count = len(divergence.recording.micro.spans)
    try:
        for args, kwargs, _ in divergence.recording.calls[name][:count]:
            changed = {**kwargs, **changes}
            if changed.get("position_embeddings", ()) is None:
                cosine, sine = kwargs["position_embeddings"]
                unturned = torch.ones_like(cosine), torch.zeros_like(sine)
                changed["position_embeddings"] = unturned
            module(*args, **changed)
    finally:
        hook.remove()
    return divergence.recording.assemble(point, kept)
