"""Floating-point operations of a training step, vision included: for MFU.

Counted as in mcore ``num_floating_point_operations``: a multiply and an add are two, backward costs
twice the forward pass, causal attention half of the full square; recomputed work is not counted.
Nor is what nobody needs: the gradients of frozen weights, and the backward of a frozen tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.parameters import active_experts, by_part

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


@dataclass(frozen=True)
class Trained:
    """Shares of the weights that train; an adapter is hardly any."""

    vision: float = 1.0
    aligner: float = 1.0
    language: float = 1.0


ALL = Trained()


def language(
    a: Architecture, tokens: float, squared_lengths: float, trained: Trained = ALL
) -> float:
    """FLOPs of the language model for one step.

    Args:
        a: the model's shape.
        tokens: real tokens, padding left out.
        squared_lengths: sum of the squared lengths of all samples.
        trained: what needs gradients. Those of activations reach the first layer in any case.
    """
    parts = by_part(a)
    linears = parts["attention"] + parts["mlp"] + parts["router"] + active_experts(a)
    linears += parts["embedding"]  # as large as the head, tied or not
    # Scores and values, each over half of the square.
    core = a.num_hidden_layers * a.num_attention_heads * a.head_dim * squared_lengths
    passes = FORWARD_AND_BACKWARD - 1 + trained.language
    return MULTIPLY_ADD * (passes * linears * tokens + FORWARD_AND_BACKWARD * core)


def vision(a: Architecture, patches: float, squared_frames: float, trained: Trained = ALL) -> float:
    """FLOPs of the vision tower for one step.

    Args:
        a: the model's shape.
        patches: patches of all images and video frames.
        squared_frames: sum of the squared patch counts of all frames; attention is full in a frame.
        trained: what needs gradients.
    """
    v = a.vision
    merged = v.hidden_size * v.spatial_merge_size**2
    features = (1 + len(v.deepstack_visual_indexes)) * merged * (merged + v.out_hidden_size)
    mergers = features / v.spatial_merge_size**2
    tower = v.patch_dim * v.hidden_size
    tower += v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
    core = 2 * v.depth * v.hidden_size * squared_frames
    into_tower = bool(trained.vision)
    linears = (1 + into_tower + trained.vision) * tower
    linears += (1 + into_tower + trained.aligner) * mergers
    return MULTIPLY_ADD * (linears * patches + (FORWARD_AND_BACKWARD if into_tower else 1) * core)


def model(
    a: Architecture,
    tokens: float,
    squared_lengths: float,
    patches: float,
    squared_frames: float,
    trained: Trained = ALL,
) -> float:
    """FLOPs of both for one step; see :func:`language` and :func:`vision`."""
    return language(a, tokens, squared_lengths, trained) + vision(
        a, patches, squared_frames, trained
    )
