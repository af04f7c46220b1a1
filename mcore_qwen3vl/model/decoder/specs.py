"""The two layer specs, ``torch`` and ``te``, of the same model with the same checkpoint keys.

Both start from Megatron-Core's own spec and change what Qwen3-VL needs: rotary positions, DeepStack
and, for ``torch``, norms and core attention that support SP, CP and packing.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.decoder.experts import GroupedExperts
from mcore_qwen3vl.model.decoder.layer import DeepStackLayer
from mcore_qwen3vl.model.decoder.mlp import GatedMLP
from mcore_qwen3vl.model.decoder.norm import RMSNorm, StandaloneRMSNorm
from mcore_qwen3vl.model.decoder.rope import RotarySelfAttention
from mcore_qwen3vl.model.recompute import remember_fused_norms
from mcore_qwen3vl.model.transformer_config import Spec, layers_of_chunk
from mcore_qwen3vl.model.weight_gradients import accumulate_in_products


def block_spec(
    config: TransformerConfig,
    spec: Spec,
    *,
    deepstack_layers: int,
    keep_activations: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the decoder layers of one pipeline chunk, dense or MoE as ``moe_layer_freq`` says.

    The arguments are those of :class:`mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`, and the number of
    layers, counted from the first, that add visual features.

    Raises:
        BadInput: the spec is ``te``, and Transformer Engine is not installed.
    """
    if spec == "te":
        _prepare_transformer_engine()
        remember_fused_norms()
        from megatron.core.extensions.transformer_engine import TENorm as Norm
    else:
        Norm = StandaloneRMSNorm
    if config.num_moe_experts is not None:
        _keep_local_counts()
        token_dispatcher._DeepepManager._indices_to_multihot = _indices_to_multihot
    if config.gradient_accumulation_fusion:
        accumulate_in_products()
    moe_layers = [_is_moe(config, number) for number in range(config.num_layers)]
    make = _te_layer if spec == "te" else _torch_layer
    kinds = {moe: make(config, moe) for moe in set(moe_layers)}
    for layer in kinds.values():
        layer.module = DeepStackLayer
        layer.params = {"deepstack_layers": deepstack_layers, "recomputes": not keep_activations}
        layer.submodules.self_attention.module = RotarySelfAttention
        mlp = layer.submodules.mlp
        if getattr(mlp, "func", None) == MLP.as_mlp_submodule:  # a dense one
            layer.submodules.mlp = partial(GatedMLP.as_mlp_submodule, **mlp.keywords)
    held = layers_of_chunk(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[moe_layers[number]] for number in held], layer_norm=Norm
    )


def _torch_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    parts: Any = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = StandaloneRMSNorm if moe else RMSNorm
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = StandaloneRMSNorm
    attention.core_attention = TorchAttention
    if moe:
        if config.moe_grouped_gemm:
            parts.mlp.keywords["submodules"].experts = GroupedExperts
        # mcore renames this norm as if it were fused into a dense MLP. Transformer Engine's MoE
        # layers keep it apart, and a checkpoint must fit both.
        del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer


def _te_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=True,
    )


def _prepare_transformer_engine() -> None:
    # Transformer Engine limits the tensors of a call over all parameters by this size. Its default
    # of 20 MiB is too small for the adapters of all experts. It reads the size at the first tensor.
    os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "200")
    # On Hopper one CUTLASS kernel then multiplies all experts of a rank in bf16. Otherwise each
    # expert is a launch, and with 128 of them the step takes twice as long (docs/gpu.md).
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise BadInput(
            "The te spec needs Transformer Engine and a GPU: install mcore-qwen3vl[te] (or use a "
            "container that has it), or choose the torch spec, which also runs on the CPU."
        )


def _is_moe(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0


def _keep_local_counts() -> None:
    """Keep a rank's own token counts per expert when they are summed over the ranks.

    Megatron sums in place over the TP x CP group. With a padding mask it then takes the number of
    its own tokens from the same tensor, and the gradient of the balancing loss is too large by a
    factor of the group's size (NVIDIA/Megatron-LM#7452, finding 10).
    """
    reduce = moe_utils.reduce_from_tensor_model_parallel_region
    if hasattr(reduce, "keeps"):
        return

    def reduce_copy(counts: Tensor, *arguments: Any, **named: Any) -> Any:
        return reduce(counts.clone(), *arguments, **named)

    reduce_copy.keeps = True  # type: ignore[attr-defined]
    moe_utils.reduce_from_tensor_model_parallel_region = reduce_copy


def _indices_to_multihot(self: Any, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Spread DeepEP's lists of chosen experts over this rank's experts without a host sync.

    Megatron selects the valid entries by a mask, for whose number the host waits four times in
    every layer. The arguments and results are those of the method of this name that it replaces.

    Args:
        indices: (T, k) int64 experts of this rank, -1 for those of other ranks.
        probs: (T, k) float32.

    Returns:
        (T, E) bool, whether an expert takes a token, and (T, E) float32, with which weight.
    """
    held = self.num_local_experts
    columns = indices.where(indices >= 0, held)  # one more column, for experts of other ranks
    chosen = torch.zeros(len(indices), held + 1, dtype=torch.bool, device=indices.device)
    weights = torch.zeros(chosen.shape, dtype=probs.dtype, device=probs.device)
    chosen = chosen.scatter_(1, columns, True)[:, :held]
    return chosen.contiguous(), weights.scatter(1, columns, probs)[:, :held].contiguous()
