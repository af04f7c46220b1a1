"""Conversion of a model's HF shape to Megatron-Core's ``TransformerConfig``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_qwen3vl.config import Architecture, DeltaNetArchitecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.megatron_config import config_fields
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.attention import rope_frequencies
from mcore_qwen3vl.model.decoder.delta_net import KERNEL_DTYPES

label_module(__file__, "model, other")

HOPPER = 9
"""The major compute capability of an H100 and an H200."""

Spec = Literal["torch", "te"]
"""The modules that a layer is made of: plain torch (CPU and CUDA), or Transformer Engine (CUDA)."""


WIDEST_HEAD_OF_OLD_CUDNN = 128
"""A cuDNN before `FIRST_CUDNN_FOR_WIDER_HEADS` has right gradients up to this size of a head."""
FIRST_CUDNN_FOR_WIDER_HEADS = (9, 18, 0)
"""Before it, the backward pass of packed attention uses a workspace that it has not initialized on
Hopper. Source: Transformer Engine's issue 2186, and an H100: with 9.14 the outputs of heads of 192
and 256 were right, and the gradients off by 9 to 190 % or NaN; with 9.19 they were right."""


def transformer_config(
    architecture: Architecture, *, spec: Spec = "torch", **overrides: Any
) -> TransformerConfig:
    """Return the config of `architecture`'s language model.

    The router's auxiliary loss is Megatron's, with coefficient 0: HF trains without one too, unless
    ``output_router_logits`` is set. Pass ``moe_aux_loss_coeff=architecture.router_aux_loss_coef``
    (and ``moe_z_loss_coeff``) to train with it.

    Overrides are any ``TransformerConfig`` fields; ``Layout.config_overrides()`` gives the parallel
    sizes. If they change what the architecture sets, the model is another one.

    Raises:
        BadInput: the overrides ask for what this spec or this pipeline split cannot do.
    """
    _check_spec(spec, overrides)
    _check_graphs(overrides)
    if not overrides.get("qk_layernorm", True):
        raise BadInput(
            "qk_layernorm is False: the model would have no norms of queries and keys, which the "
            "model has, and would drop them from checkpoints silently. Leave it True."
        )
    dtype = overrides.get("params_dtype", getattr(torch, architecture.dtype))
    if overrides.get("fp32_residual_connection") and dtype != torch.float32:
        raise BadInput(
            "fp32_residual_connection: the norms of a model in half precision would give float32 "
            "to products in half precision. Leave it out."
        )
    fields = config_fields(architecture)
    fields |= {
        "activation_func": getattr(F, fields["activation_func"]),
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    if (overrides.get("virtual_pipeline_model_parallel_size") or 1) > 1:
        fields |= {
            "microbatch_group_size_per_vp_stage": overrides["pipeline_model_parallel_size"],
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if any(architecture.moe_layers):
        fields |= {"moe_grouped_gemm": True, "expert_tensor_parallel_size": 1}  # mcore's is TP
    fields |= overrides
    if fields.get("variable_seq_lengths"):
        # HybridEP takes the same number of tokens from every rank.
        fields["moe_hybridep_pad_uneven_dispatch_inputs"] = True
    _, factor = rope_frequencies(architecture)
    whole_heads = architecture.rotary_dim == architecture.head_dim
    if fields.get("softmax_scale") is None and factor != 1 and whole_heads:
        # It is missing, or None as in Megatron's flags. Under a scaled rope HF multiplies the
        # rotated queries and keys by a factor, which scales their products by its square. As a
        # scale of the products it costs nothing, and suits fused rotary kernels. It cannot stand
        # for a factor of a part of each head.
        fields["softmax_scale"] = factor**2 / architecture.head_dim**0.5
    _check_interleaving(fields)
    if spec == "te" and architecture.head_dim > WIDEST_HEAD_OF_OLD_CUDNN:
        _check_cudnn(architecture.head_dim, fields)
    if architecture.delta_net is not None:
        _check_delta_net(architecture.delta_net, fields)
    if (further := fields.get("mtp_num_layers")) not in (None, architecture.mtp_num_hidden_layers):
        raise BadInput(
            f"mtp_num_layers is {further}, and the model has {architecture.mtp_num_hidden_layers} "
            "MTP layers (text_config.mtp_num_hidden_layers)."
        )
    # It is set afterwards: a pipeline layout would have to name the layer, which is the head's.
    try:
        config = TransformerConfig(**fields | {"mtp_num_layers": None})
    except (AssertionError, ValueError) as error:
        raise BadInput(f"Megatron refuses this model's settings: {error}") from error
    config.mtp_num_layers = further
    deepstack_layers = len(architecture.vision.deepstack_visual_indexes)
    several = config.pipeline_model_parallel_size > 1
    left = deepstack_layers - len(layers_of_chunk(config, vp_stage=0, pp_rank=0)) if several else 0
    if left > 0 or (several and config.mtp_num_layers):
        if config.moe_token_dispatcher_type == "allgather":
            what = "DeepStack features" if left > 0 else "the next tokens' embeddings"
            raise BadInput(
                f"Under this pipeline split {what} travel to later stages by "
                "variable-length transfers, which Megatron-Core's allgather token dispatcher "
                "refuses: use moe_token_dispatcher_type alltoall."
            )
        config.variable_seq_lengths = True
    return config


def layers_of_chunk(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> range:
    """Return the indices in the whole model of a pipeline chunk's decoder layers; may be empty."""
    custom = config.pipeline_model_parallel_layout
    if custom is not None:
        # mcore's functions that are used below would ignore `pp_rank` and take the calling rank's.
        of_chunk = {"layer_type": LayerType.decoder, "vp_stage": vp_stage, "pp_rank": pp_rank}
        first = custom.get_layer_offset(**of_chunk)
        return range(first, first + custom.get_num_layers_to_build(**of_chunk))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))


def _check_spec(spec: Spec, overrides: dict[str, Any]) -> None:
    """Refuse an unknown spec, and options that the torch spec lacks."""
    if spec not in ("torch", "te"):
        raise BadInput(f"Layer spec {spec!r} is not known; use 'torch' or 'te'.")
    if spec == "te":
        return
    # Megatron-Core would silently ignore most of these. With use_te_activation_func, shared experts
    # would apply silu to both halves of their inputs.
    for name in (
        "moe_apply_probs_on_input", "fp8", "fp4", "tp_comm_overlap", "use_te_activation_func",
    ):  # fmt: skip
        if overrides.get(name):
            raise BadInput(
                f"{name} needs Transformer Engine, which the torch spec does not use: use the te "
                f"spec, or drop {name}."
            )
    for name in ("moe_permute_fusion", "moe_router_fusion"):
        if overrides.get(name) and not HAVE_TE:
            raise BadInput(
                f"{name} needs kernels of Transformer Engine, which is not installed: install "
                f"mcore-qwen3vl[te], or drop {name}."
            )
    fused = {"layernorm", "moe_act"} & set(overrides.get("recompute_modules") or ())
    if fused:
        raise BadInput(
            f"Recomputing {' and '.join(sorted(fused))} needs Transformer Engine, which the torch "
            "spec does not use: recompute core_attn, mlp or moe."
        )
    if overrides.get("attention_dropout"):
        raise BadInput("The torch spec has no attention dropout; these models use none either.")


def _check_cudnn(head_dim: int, fields: dict[str, Any]) -> None:
    """Refuse a cuDNN whose gradients are wrong, if Transformer Engine would take its attention."""
    backend = fields.get("attention_backend", AttnBackend.auto)
    if (
        fields["params_dtype"] not in KERNEL_DTYPES
        or backend not in (AttnBackend.auto, AttnBackend.fused)
        or not (HAVE_TE and torch.cuda.is_available())
        or torch.cuda.get_device_capability()[0] != HOPPER
    ):
        return
    from transformer_engine.pytorch.utils import get_cudnn_version

    version = get_cudnn_version()
    if version < FIRST_CUDNN_FOR_WIDER_HEADS:
        names = [".".join(map(str, v)) for v in (version, FIRST_CUDNN_FOR_WIDER_HEADS)]
        raise BadInput(
            f"Transformer Engine has loaded cuDNN {names[0]}, whose gradients of packed attention "
            f"are wrong on this GPU for heads of {head_dim}. It takes the system's before that of "
            f"Python packages: update it to {names[1]} or later, let LD_LIBRARY_PATH begin with "
            "the lib folder of the nvidia-cudnn package that PyTorch brings, or use --spec torch "
            "(train also takes --attention-backend unfused)."
        )


def _check_delta_net(net: DeltaNetArchitecture, fields: dict[str, Any]) -> None:
    """Refuse what gated delta nets cannot do: missing kernels, a recomputed norm, uneven FP8."""
    on_gpu = torch.cuda.is_available() and not fields.get("deterministic_mode")
    if on_gpu and fields["params_dtype"] in KERNEL_DTYPES and find_spec("fla") is None:
        raise BadInput(
            "The gated delta nets of this model need the kernels of flash-linear-attention on a "
            "GPU in half precision, and it is not installed: install mcore-qwen3vl[fla]."
        )
    if "gdn_norm_out" in (fields.get("recompute_modules") or ()):
        raise BadInput(
            "recompute_modules has gdn_norm_out, whose output is recomputed in any case: leave it "
            "out."
        )
    if fields.get("fp8"):
        multiple = get_fp8_align_size(fields.get("fp8_recipe", TransformerConfig.fp8_recipe))
        rows = 2 * (net.key_dim + net.value_dim + net.num_value_heads)
        tp = fields.get("tensor_model_parallel_size", 1)
        if rows // tp % multiple:
            raise BadInput(
                f"FP8 needs a multiple of {multiple} rows in the input projection of each gated "
                f"delta net, and TP {tp} leaves {rows // tp} of {rows}: use a smaller TP or bf16."
            )


def _check_graphs(overrides: dict[str, Any]) -> None:
    """Refuse CUDA graphs, by any of the names of Megatron's versions."""
    for name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
        if overrides.get(name) not in (None, False, "none"):
            raise BadInput(
                f"{name} is {overrides[name]}: a CUDA graph needs the same number of image tokens "
                "in every batch, which differs here, and Megatron's per-layer graphs leave "
                f"DeepStack out. Drop {name}."
            )


def _check_interleaving(fields: dict[str, Any]) -> None:
    """Refuse batched transfers of an interleaved schedule on gloo, which silently mismatch."""
    vpp = fields.get("virtual_pipeline_model_parallel_size") or 1
    if vpp > 1 and not fields["overlap_p2p_comm"] and not torch.cuda.is_available():
        raise BadInput(
            f"VPP {vpp} without overlap_p2p_comm gives wrong results on the CPU backend: leave "
            "overlap_p2p_comm and batch_p2p_comm at their defaults."
        )
