"""Floating-point operations of a training step, vision included: for MFU.

Counted as in mcore ``num_floating_point_operations``: a multiply and an add are two, backward costs
twice the forward pass, causal attention half of the full square; recomputed work is not counted.
"""

from __future__ import annotations

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


def language(a: Architecture, tokens: float, squared_lengths: float) -> float:
    """FLOPs of the language model for one step.

    Args:
        a: the model's shape.
        tokens: real tokens, padding left out.
        squared_lengths: sum of the squared lengths of all samples.
    """
    parts = parameters.by_part(a)
    linears = parts["attention"] + parts["mlp"] + parts["router"] + parameters.active_experts(a)
    linears += parts["embedding"]  # as large as the head, tied or not
    # Scores and values, each over half of the square.
    core = a.num_hidden_layers * a.num_attention_heads * a.head_dim * squared_lengths
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * (linears * tokens + core)


def vision(a: Architecture, patches: float, squared_frames: float) -> float:
    """FLOPs of the vision tower for one step.

    Args:
        a: the model's shape.
        patches: patches of all images and video frames.
        squared_frames: sum of the squared patch counts of all frames; attention is full in a frame.
    """
    v = a.vision
    merged = v.hidden_size * v.spatial_merge_size**2
    per_feature = (1 + len(v.deepstack_visual_indexes)) * merged * (merged + v.out_hidden_size)
    per_patch = (
        v.patch_dim * v.hidden_size
        + v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
        + per_feature / v.spatial_merge_size**2
    )
    core = 2 * v.depth * v.hidden_size * squared_frames
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * (per_patch * patches + core)
