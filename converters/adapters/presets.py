"""The usual LoRA targets, by PEFT's names; no other module lists them.

Every name is long enough to match the same modules under any PEFT: ``proj`` would match the patch
embedding too, and ``linear_fc1`` both the blocks of the vision tower and its mergers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput

Preset = Literal["language", "language-aligner", "all"]
"""``language``: attention and MLPs (or experts) of the decoder; ``language-aligner``: also the
mergers between vision and language; ``all``: also the blocks of the vision tower."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SCORE = "score"
"""The module of a classifier's head, which PEFT trains whole."""

ROUTER = "mlp.gate.weight"
MERGERS = ("merger.linear_fc1", "merger.linear_fc2")
VISION = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Targets(NamedTuple):
    """``target_modules`` and ``target_parameters`` of a PEFT config."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] | None


def preset(name: str, architecture: Architecture) -> Targets:
    """Return PEFT's names for a preset.

    Args:
        architecture: architecture of the model. Parts that it lacks are not named, since a target
            that matches nothing is an error.
    """
    if name not in get_args(Preset):
        raise BadInput(f"{name!r} is not one of {', '.join(get_args(Preset))}.")
    modules = [*ATTENTION]
    if not all(architecture.moe_layers):
        modules += MLP
    if name != "language":
        modules += MERGERS
        count = len(architecture.vision.deepstack_visual_indexes)
        modules += [
            f"deepstack_merger_list.{at}.{linear}"
            for at in range(count)
            for linear in ("linear_fc1", "linear_fc2")
        ]
    if name == "all":
        modules += VISION
    return Targets(tuple(modules), EXPERTS if architecture.is_moe else None)
