"""A router with the right weight that chooses or weighs experts in another way."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.result import Cause


def find_router_cause(divergence: Divergence) -> Cause | None:
    """Another number of experts, another score function, or a tie that rounding decides."""
    if divergence.forward is None or not divergence.name.endswith(".mlp.gate"):
        return None
    logits = _logits(divergence)
    right = divergence.architecture.num_experts_per_tok
    chosen = int((divergence.actual != 0).sum(1).median())
    softmax = logits.softmax(1)
    ways = [
        ("router top-k", f"{chosen} experts a token are chosen instead of {right}", logits, True),
        ("router scores", "the chosen experts' weights do not add up to 1", softmax, False),
        ("router scores", "a sigmoid replaces the softmax", logits.sigmoid(), False),
    ]
    for kind, sentence, scores, renormalise in ways:
        outcome = _weigh(scores, chosen, renormalise)
        if (kind != "router top-k" or chosen != right) and divergence.explains(outcome):
            return Cause(
                kind,
                f"At {divergence.name} {sentence}.{_config(divergence)}",
                divergence.evidence("Hugging Face's logits weighed that way", outcome),
            )
    return _near_tie(divergence, logits, right)


def _logits(divergence: Divergence) -> Tensor:
    point = divergence.point
    assert point is not None
    calls = divergence.recording.calls[point.module][: len(divergence.recording.micro.spans)]
    whole = divergence.recording.assemble(point, [output[0] for _, _, output in calls])
    return whole.flatten(0, -2)[divergence.rows]


def _weigh(scores: Tensor, count: int, renormalise: bool) -> Tensor:
    """(T, E): the `count` largest of each row, as they are or with a softmax over them."""
    top = scores.topk(count, dim=1)
    values = top.values.softmax(1) if renormalise else top.values
    return torch.zeros_like(scores).scatter(1, top.indices, values)


def _near_tie(divergence: Divergence, logits: Tensor, count: int) -> Cause | None:
    """Tokens whose last chosen and first rejected expert are closer than rounding."""
    differ = ((divergence.actual != 0) != (divergence.expected != 0)).any(1)
    if not bool(differ.any()):
        return None
    ranked = logits.sort(dim=1, descending=True).values
    gaps = (ranked[:, count - 1] - ranked[:, count])[differ]
    scale = logits.abs().max()
    if bool((gaps > divergence.tolerance * scale).any()):
        return None
    return Cause(
        "router tie",
        f"{int(differ.sum())} tokens choose another expert at {divergence.name} because two "
        f"experts score alike (at most {gaps.max().item():.1e} apart): rounding decides, not a "
        "mistake.",
        f"Logits reach {scale.item():.2g} and may be off by {divergence.tolerance:.1e} of that.",
    )


def _config(divergence: Divergence) -> str:
    if divergence.examined.num_experts_per_tok == divergence.architecture.num_experts_per_tok:
        return ""
    count = divergence.examined.num_experts_per_tok
    return f" The examined checkpoint's config gives num_experts_per_tok as {count}."
