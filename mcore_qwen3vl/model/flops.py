"""Floating-point operations (FLOPs) of a training step, vision included: for MFU.

We count as mcore's ``num_floating_point_operations`` does: a multiply and an add are two, the
backward pass costs twice the forward pass, and causal attention costs half of the full square.
Recomputed work does not count, nor do the gradients of frozen weights and the backward pass of a
frozen tower, which nobody needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.parameters import (
    count_active_expert_parameters,
    count_by_kind,
)

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


@dataclass(frozen=True)
class Trained:
    """The share of each part's weights that trains, from 0 to 1; near 0 for an adapter."""

    vision: float = 1.0
    aligner: float = 1.0
    language: float = 1.0


ALL = Trained()


def language[Amount: (float, np.ndarray)](
    a: Architecture,
    tokens: Amount,
    squared_lengths: Amount,
    trained: Trained = ALL,
    *,
    mtp: bool = False,
) -> Amount:
    """Return the FLOPs of the language model for one step.

    Padding is not among the tokens; `squared_lengths` is the sum over all samples. Gradients of
    activations reach the first layer, whatever trains. With `mtp` the MTP layer trains, which
    takes a layer with attention and the head once more.
    """
    parts = count_by_kind(a)
    linears = (
        parts["attention"] + parts["mlp"] + parts["router"] + count_active_expert_parameters(a)
    )
    linears += parts["shared experts"]
    linears += parts["embedding"]  # as large as the head, tied or not
    # Scores and weighted values, each over half of the square.
    attentions = a.num_hidden_layers - sum(a.delta_net_layers) + mtp
    if mtp:
        # The MTP layer's part has all of its experts, and a token uses a few.
        idle = (parts["experts"] - count_active_expert_parameters(a)) // max(sum(a.moe_layers), 1)
        linears += count_by_kind(a, mtp=True)["MTP"] - idle + parts["embedding"]
    core = attentions * a.num_attention_heads * a.head_dim * squared_lengths
    core += delta_rule_operations(a) * tokens
    passes = FORWARD_AND_BACKWARD - 1 + trained.language
    return MULTIPLY_ADD * (passes * linears * tokens + FORWARD_AND_BACKWARD * core)


def delta_rule_operations(a: Architecture) -> float:
    """Return the multiplications and additions that a token's delta rules take in all layers.

    The state of a head, key_head_dim x value_head_dim, decays, is read with the key, is changed,
    and is read with the query. Kernels take more, for whole chunks.
    """
    if (net := a.delta_net) is None:
        return 0
    return sum(a.delta_net_layers) * 4 * net.num_value_heads * net.key_head_dim * net.value_head_dim


def vision[Amount: (float, np.ndarray)](
    a: Architecture, patches: Amount, squared_frames: Amount, trained: Trained = ALL
) -> Amount:
    """Return the FLOPs of the vision tower for one step.

    `squared_frames` is the sum of the squared patch counts of all frames: attention is full in one.
    """
    v = a.vision
    merged = v.hidden_size * v.spatial_merge_size**2
    features = (1 + len(v.deepstack_visual_indexes)) * merged * (merged + v.out_hidden_size)
    mergers = features / v.spatial_merge_size**2
    tower = v.patch_dim * v.hidden_size
    tower += v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
    core = 2 * v.depth * v.hidden_size * squared_frames
    into_tower = bool(trained.vision)  # else nobody needs the gradients of its activations
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
    *,
    mtp: bool = False,
) -> float:
    """Return the FLOPs of the whole model for one step; see :func:`language` and :func:`vision`."""
    of_tower = vision(a, patches, squared_frames, trained)
    return language(a, tokens, squared_lengths, trained, mtp=mtp) + of_tower
