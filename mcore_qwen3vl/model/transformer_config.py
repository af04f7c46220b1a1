"""From the HF shape of a model to Megatron-Core's ``TransformerConfig``."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput

Spec = Literal["torch", "te"]
"""Which modules make a layer: plain torch (CPU and CUDA), or Transformer Engine (CUDA)."""


def transformer_config(
    architecture: Architecture, *, spec: Spec = "torch", **overrides: Any
) -> TransformerConfig:
    """The config of `architecture`'s language model.

    Args:
        architecture: the model's shape.
        spec: the layer spec it is meant for.
        overrides: any ``TransformerConfig`` field. What the architecture fixes can be overridden
            too, which gives another model. ``Layout.config_overrides()`` gives the parallel sizes.

    The router's auxiliary loss is of Megatron's kind with coefficient 0, as HF trains unless
    ``output_router_logits`` is set; pass ``moe_aux_loss_coeff=architecture.router_aux_loss_coef``
    (and ``moe_z_loss_coeff``) to train with it.

    Raises:
        BadInput: the overrides ask for what this spec or this split cannot do.
    """
    _check_spec(spec, overrides)
    _check_graphs(overrides)
    dtype = overrides.get("params_dtype", getattr(torch, architecture.dtype))
    fields: dict[str, Any] = {
        **_language(architecture),
        **(_experts(architecture, spec) if any(architecture.moe_layers) else {}),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        "use_cpu_initialization": not torch.cuda.is_available(),
        **_interleaving(overrides),
        **overrides,
    }
    _check_interleaving(fields)
    # Known only to the config itself: how many layers a stage builds.
    probe = TransformerConfig(**fields)
    if features_cross_stages(probe, len(architecture.vision.deepstack_visual_indexes)):
        if fields.get("moe_token_dispatcher_type") == "allgather":
            raise BadInput(
                "This pipeline split leaves DeepStack layers to later stages, to which features "
                "travel by variable-length transfers, and Megatron-Core's allgather token "
                "dispatcher refuses those: use moe_token_dispatcher_type alltoall."
            )
        fields["variable_seq_lengths"] = True
    return TransformerConfig(**fields)


def features_cross_stages(config: TransformerConfig, deepstack_layers: int) -> bool:
    """Whether the first pipeline chunk has fewer decoder layers than there are DeepStack layers."""
    if config.pipeline_model_parallel_size == 1:
        return False
    return get_num_layers_to_build(config, vp_stage=0, pp_rank=0) < deepstack_layers


def _language(a: Architecture) -> dict[str, Any]:
    return {
        "num_layers": a.num_hidden_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.intermediate_size,
        "num_attention_heads": a.num_attention_heads,
        "num_query_groups": a.num_key_value_heads,
        "kv_channels": a.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.rms_norm_eps,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": a.initializer_range,
        "mrope_section": list(a.mrope_section),
        "bias_dropout_fusion": False,  # there is neither bias nor dropout to fuse
        "masked_softmax_fusion": False,
        "deallocate_pipeline_outputs": True,
        # mcore checks its default, allgather, against variable lengths in dense models too.
        "moe_token_dispatcher_type": "alltoall",
    }


def _experts(a: Architecture, spec: Spec) -> dict[str, Any]:
    return {
        "num_moe_experts": a.num_experts,
        "moe_ffn_hidden_size": a.moe_intermediate_size,
        "moe_router_topk": a.num_experts_per_tok,
        "moe_layer_freq": [int(moe) for moe in a.moe_layers] if a.mixed_layers else 1,
        # Softmax after top-k equals HF's softmax over all, then top-k, then normalised.
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": spec == "te",
        "expert_tensor_parallel_size": 1,
    }


def _check_spec(spec: Spec, overrides: dict[str, Any]) -> None:
    if spec not in ("torch", "te"):
        raise BadInput(f"Layer spec {spec!r} is not known; use 'torch' or 'te'.")
    if spec == "te":
        return
    # Most of these Megatron-Core would ignore in silence.
    for name in ("moe_grouped_gemm", "fp8", "fp4", "moe_permute_fusion", "tp_comm_overlap"):
        if overrides.get(name):
            raise BadInput(
                f"{name} needs Transformer Engine, which the torch spec does without: use the te "
                f"spec, or drop {name}."
            )
    fused = {"layernorm", "moe_act"} & set(overrides.get("recompute_modules") or ())
    if fused:
        raise BadInput(
            f"Recomputing {' and '.join(sorted(fused))} needs Transformer Engine, which the torch "
            "spec does without: recompute core_attn, mlp or moe."
        )
    if overrides.get("attention_dropout"):
        raise BadInput("The torch spec has no attention dropout; Qwen3-VL uses none either.")


def _check_graphs(overrides: dict[str, Any]) -> None:
    for name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
        if overrides.get(name) not in (None, False, "none"):
            raise BadInput(
                f"{name} is {overrides[name]}: a CUDA graph repeats one number of image tokens, "
                "which differs from batch to batch, and Megatron's graphs of single layers leave "
                f"DeepStack out. Drop {name}."
            )


def _interleaving(overrides: dict[str, Any]) -> dict[str, Any]:
    if (overrides.get("virtual_pipeline_model_parallel_size") or 1) == 1:
        return {}
    return {
        "microbatch_group_size_per_vp_stage": overrides["pipeline_model_parallel_size"],
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _check_interleaving(fields: dict[str, Any]) -> None:
    """On gloo, batched transfers of an interleaved schedule pair up wrongly, in silence."""
    vpp = fields.get("virtual_pipeline_model_parallel_size") or 1
    if vpp > 1 and not fields["overlap_p2p_comm"] and not torch.cuda.is_available():
        raise BadInput(
            f"VPP {vpp} without overlap_p2p_comm gives wrong results on the CPU backend: leave "
            "overlap_p2p_comm and batch_p2p_comm at their defaults."
        )
