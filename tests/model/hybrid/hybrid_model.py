"""Qwen3-VL as a Megatron-Core ``HybridModel``: the proof of ``docs/hybrid.md``, not the product.

A ``HybridModel`` has one layer for attention and one for the MLP, in the order of a pattern such as
``*-*-|*-*-``, where ``|`` cuts the pipeline. Its ``forward`` has no argument for the three-axis
positions, and that of its ``HybridStack`` none for DeepStack's features. What it does hand to every
layer unchanged, recomputed or not, is ``packed_seq_params``. So a :class:`Load` goes along there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.decoder.attention import InterleavedMRoPE, rotary_factor
from mcore_qwen3vl.model.decoder.layer import DeepStackLayer, add_to_rows, block_spec
from mcore_qwen3vl.model.decoder.norm import StandaloneRMSNorm
from mcore_qwen3vl.model.head import Head
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.model.vision import VisionTower

MLPS = "-E"
"""The symbols of layers that end a layer of Hugging Face's."""


@dataclass(frozen=True)
class Load:
    """What travels as ``packed_seq_params`` from the model's call to its layers.

    Attributes:
        packed: the packing; None if nothing is packed.
        positions: (3, B, s) integers.
        features: DeepStack features (k, n, H) of this chunk and later ones, or None.
        destination: (n,) rows of the hidden states that they are added to.
    """

    packed: PackedSeqParams | None
    positions: Tensor
    features: Tensor | None
    destination: Tensor

    @property
    def qkv_format(self) -> str | None:  # the model asks for it
        return None if self.packed is None else self.packed.qkv_format


class LoadedPositions(InterleavedMRoPE):
    """Rotary angles of the positions in a :class:`Load`, where the model expects a length."""

    def get_rotary_seq_len(self, *arguments: Any) -> Tensor:
        *_, load = arguments
        return load.positions


class HybridLayer(DeepStackLayer):
    """Attention or an MLP, with features added after the MLP of the first few of HF's layers."""

    @property
    def hf_layer(self) -> int:
        """The number of the layer in Hugging Face's model, counted from 0."""
        return (self.layer_number - 1) // 2

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        load: Load = packed_seq_params
        kwargs |= {"context": load.features, "context_mask": load.destination}
        hidden, _ = super().forward(*args, packed_seq_params=load.packed, **kwargs)
        return hidden, None

    def add_features(
        self, hidden: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        after_mlp = self.layer_number % 2 == 0
        if not after_mlp or self.hf_layer >= self.deepstack_layers or context is None:
            return hidden
        features = context[self.hf_layer - self.deepstack_layers]
        return add_to_rows(hidden, features, context_mask)


class Stack(HybridStack):
    """A ``HybridStack`` that does not insist on Transformer Engine for its final norm."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = self.post_process
        if self.post_process:
            self.final_norm = StandaloneRMSNorm(
                config, config.hidden_size, eps=config.layernorm_epsilon
            )


class _OutsideRecompute(torch.autograd.Function):
    """Passes hidden states on, and in the backward pass fetches the gradient of the features.

    Only hidden states are inputs of a recomputed region. Features that its layers find elsewhere
    are a leaf there: every region adds its gradient to the leaf. When the gradient of the first
    region's input comes back, all have done so.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, features: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        collected, ctx.leaf.grad = ctx.leaf.grad, None
        return gradients[0], collected, None


def pattern(architecture: Architecture, stages: int = 1) -> str:
    """Return the hybrid layer pattern of a model, cut into stages of as many layers of HF's."""
    mixers = ["G" if delta_net else "*" for delta_net in architecture.delta_net_layers]
    mlps = ["E" if moe else "-" for moe in architecture.moe_layers]
    layers = [mixer + mlp for mixer, mlp in zip(mixers, mlps, strict=True)]
    size = len(layers) // stages
    return "|".join("".join(layers[at : at + size]) for at in range(0, len(layers), size))


class HybridQwen3VL(HybridModel):
    """Qwen3-VL on a ``HybridModel``; the arguments are those of :class:`Qwen3VLModel`.

    What is taken from there depends on neither base class.

    Args:
        layers: the hybrid layer pattern, with a ``|`` between pipeline chunks.
    """

    head_labels = fill_received = None
    local_tokens: Any = Qwen3VLModel.local_tokens
    append_carried: Any = Qwen3VLModel.append_carried
    _prepare_forward: Any = Qwen3VLModel._prepare_forward
    _embed: Any = Qwen3VLModel._embed
    _receive: Any = Qwen3VLModel._receive
    _router_padding: Any = Qwen3VLModel._router_padding
    _refuse_gathered_logits: Any = Qwen3VLModel._refuse_gathered_logits

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        submodules: HybridStackSubmodules,
        layers: str,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(
            config,
            ModuleSpec(module=Stack, submodules=submodules),
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            hybrid_layer_pattern=layers,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.architecture, self.spec, self.adapter = architecture, "torch", None
        self.has_mtp = False
        self.rotary_pos_emb = LoadedPositions(architecture)
        chunks = layers.split("|")
        chunk = (vp_stage or 0) * groups.pp.size() + groups.pp.rank()
        before = sum(symbol in MLPS for symbol in "".join(chunks[:chunk]))
        here = sum(symbol in MLPS for symbol in chunks[chunk])
        deepstack_layers = len(architecture.vision.deepstack_visual_indexes)
        self._carried_in = max(deepstack_layers - before, 0)
        self._carried_out = 0 if post_process else max(deepstack_layers - before - here, 0)
        if pre_process:
            self.visual = VisionTower(
                architecture, config, group=groups.tp_cp, fused_rotary=False, recompute=False
            )
        self.losses_in_chunks = False  # the model's forward has no output_processor
        if post_process:
            Head.adopt(self.output_layer, vocab_size=architecture.vocab_size, chunk=0)

    @classmethod
    def from_hf_config(
        cls, architecture: Architecture, *, layers: str | None = None, **options: Any
    ) -> Self:
        """Build one pipeline chunk; the options are those of `build_chunks`."""
        of_chunk = ("pre_process", "post_process", "vp_stage")
        chunk = {name: options.pop(name) for name in of_chunk if name in options}
        options = {name: value for name, value in options.items() if name != "head_chunk"}
        stages = options.get("pipeline_model_parallel_size", 1)
        whole = options | {"pipeline_model_parallel_size": 1}
        config = transformer_config(architecture, **whole)
        submodules = _submodules(config, architecture)
        config.num_layers = 2 * architecture.num_hidden_layers
        config.pipeline_model_parallel_size = stages
        config.variable_seq_lengths = stages > 1  # a stage may send features
        return cls(
            config, architecture, submodules, layers or pattern(architecture, stages), **chunk
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute logits or losses; see :meth:`Qwen3VLModel.forward`."""
        embed, destination, arguments = self._prepare_forward(*args, **kwargs)
        hidden, features = embed()
        seen = features
        full = self.config.recompute_granularity == "full"
        if full and features is not None and features.requires_grad:
            seen = features.detach().requires_grad_()
            if hidden is None:
                received = _OutsideRecompute.apply(self.decoder.input_tensor, features, seen)
                self.decoder.set_input_tensor(received)
            else:
                hidden = _OutsideRecompute.apply(hidden, features, seen)
        packed, positions = arguments["packed_seq_params"], arguments["position_ids"]
        arguments["packed_seq_params"] = Load(packed, positions, seen, destination)
        output = super().forward(**arguments, decoder_input=hidden)
        return self.append_carried(output, features)


def _submodules(config: TransformerConfig, architecture: Architecture) -> HybridStackSubmodules:
    """Return the layers of each symbol: halves of the layers that the product has."""
    specs = block_spec(
        config,
        "torch",
        deepstack_layers=len(architecture.vision.deepstack_visual_indexes),
        rotary_factor=rotary_factor(architecture),
    ).layer_specs
    layers: dict[str, ModuleSpec] = {}
    for symbols, spec in zip(pattern(architecture, len(specs)).split("|"), specs, strict=True):
        parts: Any = spec.submodules
        no_attention = {"self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
        no_mlp = {"mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
        halves = (
            replace(parts, **no_mlp, pre_mlp_layernorm=IdentityOp),
            replace(parts, **no_attention, input_layernorm=IdentityOp),
        )
        for symbol, half in zip(symbols, halves, strict=True):
            layers[symbol] = ModuleSpec(module=HybridLayer, params=spec.params, submodules=half)
    names = {"*": "attention_layer", "G": "gdn_layer", "-": "mlp_layer", "E": "moe_layer"}
    return HybridStackSubmodules(**{names[symbol]: layer for symbol, layer in layers.items()})
