"""The decoder layer, which adds DeepStack's features, and the two layer specs.

DeepStack
---------

mcore's ``TransformerBlock`` passes a ``context`` and a ``context_mask`` to every layer, meant for
cross-attention, which this model lacks. We use them for the visual features and their places. That
makes both explicit arguments of every checkpointed region: recompute detaches them and returns
their gradient like that of the hidden states, for any number of layers in a region.

Layer specs
-----------

``torch`` and ``te`` give the same model with the same checkpoint keys. Both start from
Megatron-Core's own spec and change what Qwen3-VL needs: rotary positions, DeepStack and, for
``torch``, norms and core attention that support SP, CP and packing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module, memory_label
from mcore_qwen3vl.model.decoder.attention import HeadNorm, RotarySelfAttention, TorchAttention
from mcore_qwen3vl.model.decoder.delta_net import DeltaNet
from mcore_qwen3vl.model.decoder.dispatcher import GatheringDispatcher
from mcore_qwen3vl.model.decoder.experts import GroupedExperts
from mcore_qwen3vl.model.decoder.mlp import GatedMLP
from mcore_qwen3vl.model.decoder.norm import RMSNorm, StandaloneRMSNorm
from mcore_qwen3vl.model.decoder.router import BalancedRouter
from mcore_qwen3vl.model.recompute import recomputing, remember_outputs_of
from mcore_qwen3vl.model.transformer_config import Spec, layers_of_chunk

label_module(__file__, "residual stream")


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds visual features to its output if it is one of the first few.

    Source: HF ``Qwen3VLTextModel`` (adds after the layer).

    Args:
        deepstack_layers: K, the number of layers, counted from the first, that have features.
        recomputes: whether to recompute the outputs of norms, SwiGLU and rotary embedding in the
            backward pass, see :mod:`mcore_qwen3vl.model.recompute`. Two modes turn this off. Full
            recompute holds one layer's outputs at a time anyway. Offloading of activations does not
            see the tensors that our hooks replace, and frees the inputs of their recipes.
    """

    def __init__(
        self, *args: Any, deepstack_layers: int = 0, recomputes: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.deepstack_layers = deepstack_layers
        offloads = self.config.cpu_offloading or self.config.fine_grained_activation_offloading
        full = self.config.recompute_granularity == "full"
        self.recomputes = recomputes and not offloads and not full
        for norm in (self.input_layernorm, self.pre_mlp_layernorm):
            if isinstance(norm, RMSNorm) and not offloads:
                norm.gives_residual = True
        dispatcher: Any = getattr(self.mlp, "token_dispatcher", None)
        local = self.config.transformer_impl == "local"
        if local and type(dispatcher) is MoEAlltoAllTokenDispatcher:
            dispatcher.__class__ = GatheringDispatcher
        if self.recomputes:
            names = ("q_layernorm", "k_layernorm")  # which a gated delta net lacks
            norms = (getattr(self.self_attention, name, None) for name in names)
            for norm in (self.input_layernorm, self.pre_mlp_layernorm, *norms):
                if norm is not None and not isinstance(norm, IdentityOp):
                    remember_outputs_of(norm)

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run mcore's layer; ``context`` and ``context_mask`` carry the DeepStack features.

        Args:
            context: (K - k, n, H) features of the last K - k DeepStack layers, where k of them are
                on earlier pipeline stages; or None.
            context_mask: (n,) int64 rows of the (s_local * B, H) hidden states to add them to.

        Returns:
            (s_local, B, H) hidden states, and `context` for the layers that follow.
        """
        with self.recomputing():
            hidden, _ = super().forward(*args, **kwargs)
        return self.add_features(hidden, context, context_mask), context

    def recomputing(self) -> AbstractContextManager[None]:
        """Recompute this layer's cheap outputs inside this context, unless that is off."""
        return recomputing() if self.recomputes else nullcontext()

    def add_features(
        self, hidden: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        """Add this layer's features, if it has any, to its output (s_local, B, H).

        For `context` and `context_mask` see :meth:`forward`.
        """
        if self.layer_number > self.deepstack_layers or context is None or context_mask is None:
            return hidden
        # Earlier stages keep their layers' features: the last row is always layer K's.
        features = context[self.layer_number - self.deepstack_layers - 1]
        hidden = add_to_rows(hidden, features, context_mask)
        # The schedules free a stage's output after sending it, and refuse to free a view.
        return make_viewless_tensor(hidden, requires_grad=True, keep_graph=True)


@memory_label("embedding")
def add_to_rows(hidden: Tensor, features: Tensor, destination: Tensor) -> Tensor:
    """Add visual features to the output (s_local, B, H) of a decoder layer, as DeepStack does.

    Source: Meng et al., "DeepStack", 2024; HF ``Qwen3VLTextModel._deepstack_process``.

    Args:
        features: (n, H) rows of one layer's features, from :meth:`.FusionPlan.select`.
        destination: (n,) ``FusionPlan.destination``.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])  # (s_local * B, H)
    return flat.index_add(0, destination, features.to(flat.dtype)).view_as(hidden)


def pack_features(hidden: Tensor, features: Tensor) -> Tensor:
    """Append the features (k, n, H) of later pipeline stages to the states (s_local, B, H).

    The result is (s_local + ceil(k * n / B), B, H), in the dtype of `hidden`.
    """
    batch, width = hidden.shape[1:]
    rows = features.to(hidden.dtype).reshape(-1, width)  # (k * n, H)
    rows = F.pad(rows, (0, 0, 0, -len(rows) % batch))
    return torch.cat([hidden, rows.view(-1, batch, width)])


def unpack_features(
    received: Tensor, seq_len: int, layers: int, count: int
) -> tuple[Tensor, Tensor]:
    """Invert :func:`pack_features`: return (s_local, B, H) and (`layers`, `count`, H)."""
    hidden, rows = received[:seq_len], received[seq_len:]
    features = rows.reshape(-1, rows.shape[-1])[: layers * count]
    return hidden, features.view(layers, count, rows.shape[-1])


def block_spec(
    config: TransformerConfig,
    spec: Spec,
    *,
    deepstack_layers: int,
    rotary_factor: float = 1.0,
    keep_activations: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the decoder layers of one pipeline chunk.

    The config says of each layer whether it is dense or MoE (``moe_layer_freq``), and whether it is
    attention or a gated delta net (``linear_attention_freq``). The other arguments are those of
    :class:`mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`; the number of layers, counted from the first,
    that add visual features; and the factor of :func:`.rotary_factor`. The layers work once
    :func:`.patches.patch_libraries` has been called.
    """
    if spec == "te":
        from megatron.core.extensions.transformer_engine import TENorm as Norm
    else:
        Norm = StandaloneRMSNorm
    of_layers = [_kind_of_layer(config, number) for number in range(config.num_layers)]
    params = {"deepstack_layers": deepstack_layers, "recomputes": not keep_activations}
    kinds = {kind: _layer(config, spec, kind, rotary_factor, params) for kind in set(of_layers)}
    layers = layers_of_chunk(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[of_layers[number]] for number in layers], layer_norm=Norm
    )


def mtp_spec(
    config: TransformerConfig, spec: Spec, *, rotary_factor: float, keep_activations: bool
) -> MultiTokenPredictionBlockSubmodules:
    """Return the MTP layer, which has attention.

    The arguments are those of :func:`block_spec`.
    """
    if spec == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as Linear
        from megatron.core.extensions.transformer_engine import TENorm as Norm
    else:
        Linear, Norm = ColumnParallelLinear, StandaloneRMSNorm
    kind = _Kind(moe=config.num_moe_experts is not None, delta_net=False)
    layer = _layer(config, spec, kind, rotary_factor, {"recomputes": not keep_activations})
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=Linear, mtp_model_layer=layer, layer_norm=Norm
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(MTPLayer, submodules=parts)])


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer, which gets the next tokens' embeddings.

    Megatron's own shifts token ids by one on each CP rank, with transfers, and waits for the device
    at each sample of a pack. It embeds them on its own pipeline stage, where there are no images.
    """

    def _get_embeddings(
        self,
        *,
        embedding: Tensor,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[None, None, Tensor | None, Tensor, Tensor]:
        """Return what Megatron's does; `embedding` (s_local, B, H) is that of the next tokens."""
        return None, None, padding_mask, embedding, hidden_states


def _layer(
    config: TransformerConfig, spec: Spec, kind: _Kind, rotary_factor: float, params: dict[str, Any]
) -> ModuleSpec:
    """Return a decoder layer of `kind`; `params` are arguments of :class:`DeepStackLayer`."""
    if spec == "te":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if kind.moe else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=True,
        )
    else:
        layer = _torch_layer(config, kind.moe)
    if kind.moe:
        layer.submodules.mlp.keywords["submodules"].router = BalancedRouter
    layer.module, layer.params = DeepStackLayer, params
    attention = layer.submodules.self_attention
    attention.module = RotarySelfAttention
    attention.params = {**attention.params, "factor": rotary_factor}
    if kind.delta_net:  # made of the same linear layers and norm
        parts = attention.submodules
        layer.submodules.self_attention = ModuleSpec(
            module=DeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=parts.linear_qkv, out_norm=parts.q_layernorm, out_proj=parts.linear_proj
            ),
        )
        keys = layer.submodules.sharded_state_dict_keys_map
        if "input_layernorm." in keys:  # a module of its own, with the key of a fused one
            keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    mlp = layer.submodules.mlp
    if getattr(mlp, "func", None) == MLP.as_mlp_submodule:  # a dense one
        layer.submodules.mlp = partial(GatedMLP.as_mlp_submodule, **mlp.keywords)
    return layer


def _torch_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """Return Megatron's local layer with our norms, core attention and experts."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    parts: Any = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = StandaloneRMSNorm if moe else RMSNorm
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = HeadNorm
    attention.core_attention = TorchAttention
    if moe:
        if config.moe_grouped_gemm:
            parts.mlp.keywords["submodules"].experts = GroupedExperts
        # mcore renames this norm as if it were fused into a dense MLP. Transformer Engine's MoE
        # layers keep it apart, and a checkpoint must fit both.
        del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer


class _Kind(NamedTuple):
    """What distinguishes decoder layers."""

    moe: bool
    delta_net: bool


def _kind_of_layer(config: TransformerConfig, layer: int) -> _Kind:
    """Return the kind of a decoder layer, by its index in the whole model."""
    every = config.moe_layer_freq
    moe = bool(every[layer]) if isinstance(every, list) else layer % every == 0
    delta_nets = config.linear_attention_freq
    return _Kind(
        moe=moe and config.num_moe_experts is not None,
        delta_net=isinstance(delta_nets, list) and bool(delta_nets[layer]),
    )
