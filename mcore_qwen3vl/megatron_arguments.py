"""Megatron's architecture arguments, as a Hugging Face config gives them."""

from __future__ import annotations

from typing import Any

from mcore_qwen3vl.config import Architecture


def architecture_arguments(architecture: Architecture) -> dict[str, Any]:
    """What `architecture` fixes among Megatron's arguments, by their ``dest`` name.

    A different value would be a different model.
    """
    a = architecture
    return {
        "num_layers": a.num_hidden_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.intermediate_size,
        "num_attention_heads": a.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": a.num_key_value_heads,
        "kv_channels": a.head_dim,
        "max_position_embeddings": a.max_position_embeddings,
        "vocab_size": a.vocab_size,
        "untie_embeddings_and_output_weights": not a.tie_word_embeddings,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.rms_norm_eps,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": True,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "position_embedding_type": "mrope",
        "mrope_section": list(a.mrope_section),
        "rotary_base": int(a.rope_theta) if a.rope_theta.is_integer() else a.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        **(_moe_arguments(a) if a.is_moe else {"num_experts": None}),
    }


def _moe_arguments(a: Architecture) -> dict[str, Any]:
    return {
        "num_experts": a.num_experts,
        "moe_ffn_hidden_size": a.moe_intermediate_size,
        "moe_layer_freq": [int(moe) for moe in a.moe_layers] if a.mixed_layers else 1,
        "moe_router_topk": a.num_experts_per_tok,
        # HF: softmax over all experts, then the top k renormalised; softmax over the top k is
        # the same number.
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_num_groups": None,
        "moe_router_topk_scaling_factor": None,
    }
