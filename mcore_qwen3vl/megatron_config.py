"""A model in Megatron's words, for its command line and for its ``TransformerConfig``.

One table holds both names of every setting, since some differ: ``--num-experts`` is
``num_moe_experts``, ``--swiglu`` is ``gated_linear_unit``. This module imports neither torch nor
megatron.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mcore_qwen3vl.config import Architecture


@dataclass(frozen=True)
class Fact:
    """One setting that Megatron needs to know about a model."""

    argument: str | None  # `dest` of its flag; None: the command line has none, or another value
    field: str | None  # its `TransformerConfig` field; None: there is none
    value: Any
    fixed: bool = True  # whether another value would be another model, so that no flag may set it


def architecture_arguments(architecture: Architecture) -> dict[str, Any]:
    """Return the Megatron arguments that `architecture` fixes, by ``dest`` name.

    A different value would be a different model.
    """
    facts = architecture_facts(architecture)
    return {f.argument: f.value for f in facts if f.argument and f.fixed}


def recommended_arguments(architecture: Architecture) -> dict[str, Any]:
    """Return defaults for Megatron's arguments that suit the model; a flag may change them."""
    return {
        f.argument: f.value for f in architecture_facts(architecture) if f.argument and not f.fixed
    }


def config_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the ``TransformerConfig`` fields that `architecture` determines.

    ``activation_func`` is the name of a function of ``torch.nn.functional``. Fields that depend on
    the layer spec or the layout are set by
    :func:`mcore_qwen3vl.model.transformer_config.transformer_config`.
    """
    return {f.field: f.value for f in architecture_facts(architecture) if f.field}


def architecture_facts(a: Architecture) -> list[Fact]:
    """Return every setting that Megatron needs to know about a model."""
    # A legacy checkpoint stores the arguments in this order.
    return [
        *_language_facts(a),
        *_hybrid_facts(a),
        *(
            _expert_facts(a)
            if any(a.moe_layers)
            else [Fact("num_experts", "num_moe_experts", None)]
        ),
        *_default_facts(a),
    ]


def _fact_of_both(name: str, value: Any, *, fixed: bool = True) -> Fact:
    """Return a setting whose argument and ``TransformerConfig`` field have the same name."""
    return Fact(name, name, value, fixed)


def _fact_of_flag(name: str, value: Any, *, fixed: bool = True) -> Fact:
    return Fact(name, None, value, fixed)


def _fact_of_field(name: str, value: Any) -> Fact:
    return Fact(None, name, value)


def _language_facts(a: Architecture) -> list[Fact]:
    return [
        _fact_of_both("num_layers", a.num_hidden_layers),
        _fact_of_both("hidden_size", a.hidden_size),
        _fact_of_both("ffn_hidden_size", a.intermediate_size),
        _fact_of_both("num_attention_heads", a.num_attention_heads),
        _fact_of_flag("group_query_attention", True),
        _fact_of_both("num_query_groups", a.num_key_value_heads),
        _fact_of_both("kv_channels", a.head_dim),
        _fact_of_flag("max_position_embeddings", a.max_position_embeddings),
        _fact_of_flag("vocab_size", a.vocab_size),
        _fact_of_flag("untie_embeddings_and_output_weights", not a.tie_word_embeddings),
        _fact_of_both("normalization", "RMSNorm"),
        _fact_of_both("layernorm_epsilon", a.rms_norm_eps),
        _fact_of_both("layernorm_zero_centered_gamma", a.zero_centered_norms),
        _fact_of_both("qk_layernorm", True),
        Fact("swiglu", "gated_linear_unit", True),
        _fact_of_field("activation_func", "silu"),  # --swiglu implies it
        _fact_of_both("add_bias_linear", False),
        _fact_of_both("add_qkv_bias", False),
        _fact_of_flag("position_embedding_type", "mrope"),
        _fact_of_both("mrope_section", list(a.mrope_section)),
        _fact_of_flag(
            "rotary_base", int(a.rope_theta) if a.rope_theta.is_integer() else a.rope_theta
        ),
        _fact_of_flag("rotary_percent", a.partial_rotary_factor),
        _fact_of_both("rotary_interleaved", False),
        _fact_of_both("multi_latent_attention", False),
    ]


def _hybrid_facts(a: Architecture) -> list[Fact]:
    """Return what models whose layers are all plain attention leave at Megatron's defaults."""
    if (net := a.delta_net) is None:
        return []
    return [
        _fact_of_both("attention_output_gate", a.attn_output_gate),
        # Megatron 0.20 calls it gdn, and still takes the name that 0.19 has.
        _fact_of_both("experimental_attention_variant", "gated_delta_net"),
        _fact_of_both("linear_attention_freq", [int(linear) for linear in a.delta_net_layers]),
        *(_fact_of_both(f"linear_{name}", size) for name, size in asdict(net).items()),
    ]


def _expert_facts(a: Architecture) -> list[Fact]:
    return [
        Fact("num_experts", "num_moe_experts", a.num_experts),
        _fact_of_both("moe_ffn_hidden_size", a.moe_intermediate_size),
        _fact_of_both(
            "moe_layer_freq", [int(moe) for moe in a.moe_layers] if a.mixed_layers else 1
        ),
        _fact_of_both("moe_router_topk", a.num_experts_per_tok),
        # HF takes the softmax over all experts and renormalises the top k; the softmax over the
        # top k gives the same numbers.
        _fact_of_both("moe_router_score_function", "softmax"),
        _fact_of_both("moe_router_pre_softmax", False),
        _fact_of_both("moe_router_enable_expert_bias", False),
        _fact_of_both(
            "moe_shared_expert_intermediate_size", a.shared_expert_intermediate_size or None
        ),
        *(
            [_fact_of_both("moe_shared_expert_gate", True)]
            if a.shared_expert_intermediate_size
            else []
        ),
        _fact_of_both("moe_router_num_groups", None),
        _fact_of_both("moe_router_topk_scaling_factor", None),
    ]


def _default_facts(a: Architecture) -> list[Fact]:
    facts = [
        _fact_of_both("attention_dropout", 0.0, fixed=False),
        _fact_of_both("hidden_dropout", 0.0, fixed=False),
        _fact_of_both("attention_softmax_in_fp32", True, fixed=False),
        _fact_of_both("init_method_std", a.initializer_range, fixed=False),
        # Every usual TP divides Qwen's vocabulary, so that no padding is needed.
        _fact_of_flag("make_vocab_size_divisible_by", 1, fixed=False),
        # Text is tokenised by the HF processor in the data workers; Megatron's own tokenizer
        # only has to name the vocabulary size.
        _fact_of_flag("tokenizer_type", "NullTokenizer", fixed=False),
        # Megatron's default, allgather, does not allow the variable-length transfers of some
        # pipeline splits, and mcore checks that even when the model is dense.
        _fact_of_both("moe_token_dispatcher_type", "alltoall", fixed=False),
        _fact_of_field("bias_dropout_fusion", False),  # there is neither bias nor dropout to fuse
        _fact_of_field("masked_softmax_fusion", False),
        _fact_of_field("deallocate_pipeline_outputs", True),
    ]
    if any(a.moe_layers):
        facts += [
            _fact_of_both("moe_router_dtype", "fp32", fixed=False),
            _fact_of_both("moe_router_load_balancing_type", "aux_loss", fixed=False),
            # Training balances the experts unless told otherwise. A model built directly behaves as
            # HF's, whose loss has this term only with output_router_logits.
            _fact_of_flag("moe_aux_loss_coeff", a.router_aux_loss_coef, fixed=False),
            _fact_of_field("moe_aux_loss_coeff", 0.0),
        ]
    return facts
