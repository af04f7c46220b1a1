"""Megatron's architecture arguments, taken from the Hugging Face config instead of typed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput


def architecture_arguments(architecture: Architecture) -> dict[str, Any]:
    """What `architecture` fixes among Megatron's arguments, by their ``dest`` name.

    A different value would be a different model, so a flag that contradicts one of these is an
    error (:func:`check_explicit`).
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


def recommended_arguments(architecture: Architecture) -> dict[str, Any]:
    """Defaults that suit the model and that a flag may change."""
    defaults = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "init_method_std": architecture.initializer_range,
        # Qwen's vocabulary divides by every usual TP; padding is for those that do not.
        "make_vocab_size_divisible_by": 1,
        # Text is tokenised by the HF processor in the data workers; Megatron's own tokenizer
        # only has to name the vocabulary size.
        "tokenizer_type": "NullTokenizer",
        # The other one refuses the variable-length transfers of some pipeline splits, and mcore
        # asks it even when the model is dense.
        "moe_token_dispatcher_type": "alltoall",
    }
    if architecture.is_moe:
        defaults |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": architecture.router_aux_loss_coef,
        }
    return defaults


def explicit_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that `argv` itself sets, by ``dest`` name, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    explicit = vars(parser.parse_known_args(list(argv))[0])
    for action, default in defaults:
        action.default = default
    return explicit


def check_explicit(
    parser: argparse.ArgumentParser, explicit: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse flags that contradict the checkpoint's config.

    Args:
        parser: names the flag of each argument.
        explicit: what the command line sets (:func:`explicit_arguments`).
        fixed: what the config says (:func:`architecture_arguments`).

    Raises:
        BadInput: naming every such flag, its value and the config's.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.dest}
    wrong = [
        f"{flags[name]} sets {name} to {explicit[name]}, the config says {value}"
        for name, value in fixed.items()
        if name in explicit and explicit[name] != value
    ]
    if wrong:
        raise BadInput(
            f"The command line contradicts the --hf-model config: {'; '.join(wrong)}. "
            "--hf-model supplies the architecture: leave these flags out."
        )
