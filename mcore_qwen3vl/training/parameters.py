"""How many parameters each part of a model has: for memory, FLOPs and reports."""

from __future__ import annotations

from mcore_qwen3vl.config import Architecture


def attention(a: Architecture) -> int:
    """Projections of one decoder layer's attention; the two head norms apart."""
    query, key = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    return a.hidden_size * (query + 2 * key) + query * a.hidden_size


def norms(a: Architecture) -> int:
    """Norms of one decoder layer: input, pre-MLP, query and key."""
    return 2 * a.hidden_size + 2 * a.head_dim


def dense_mlp(a: Architecture) -> int:
    """Gate, up and down of one dense layer."""
    return 3 * a.hidden_size * a.intermediate_size


def expert(a: Architecture) -> int:
    """Gate, up and down of one expert."""
    return 3 * a.hidden_size * a.moe_intermediate_size


def router(a: Architecture) -> int:
    """The gate of one MoE layer."""
    return a.num_experts * a.hidden_size


def embedding(a: Architecture) -> int:
    """The token embedding, and as much again for an untied head."""
    return a.vocab_size * a.hidden_size


def vision_block(a: Architecture) -> int:
    """One block of the tower: qkv, proj, fc1, fc2, their biases and two norms."""
    h, f = a.vision.hidden_size, a.vision.intermediate_size
    return (4 * h * h + 4 * h) + (2 * h * f + f + h) + 4 * h


def aligner(a: Architecture) -> int:
    """The merger and the DeepStack mergers."""
    v = a.vision
    merged = v.hidden_size * v.spatial_merge_size**2
    linears = merged * merged + merged + merged * v.out_hidden_size + v.out_hidden_size
    deepstack = len(v.deepstack_visual_indexes)
    # The final merger normalises patches, the DeepStack ones merged patches.
    return (1 + deepstack) * linears + 2 * v.hidden_size + deepstack * 2 * merged


def vision(a: Architecture) -> int:
    """The whole tower with its mergers."""
    v = a.vision
    patch_embedding = v.patch_dim * v.hidden_size + v.hidden_size
    positions = v.num_position_embeddings * v.hidden_size
    return patch_embedding + positions + v.depth * vision_block(a) + aligner(a)


def total(a: Architecture) -> int:
    """All parameters, a tied head counted once."""
    layers = sum(
        attention(a) + norms(a) + (a.num_experts * expert(a) + router(a) if moe else dense_mlp(a))
        for moe in a.moe_layers
    )
    heads = 1 if a.tie_word_embeddings else 2
    return layers + heads * embedding(a) + a.hidden_size + vision(a)
