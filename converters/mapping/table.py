"""The table: which Hugging Face tensors make which Megatron-Core tensor, and how.

Offline conversion, live load, export, verification and inspection all read it; there is no second
mapping. mcore names are the keys of ``sharded_state_dict()`` with Transformer Engine's names, which
megatron-core also writes to a ``torch_dist`` checkpoint: layers are stacked on the first axis and
experts on the next. A row is one piece of such a tensor: one layer, or one expert of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout, VisionArchitecture
from mcore_qwen3vl.converters.mapping import forms, transforms
from mcore_qwen3vl.converters.mapping.transforms import Rearrangement
from mcore_qwen3vl.converters.storage.boxes import Box, Selection, Shape
from mcore_qwen3vl.errors import BadInput

TEXT = "model.language_model."
EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = "decoder.layers."
"""Prefix of the keys of all decoder layers."""

CHUNK_BYTES = 16 * 2**20
"""Tensors move in pieces of this size, except a transposed expert, which moves whole."""


@dataclass(frozen=True)
class SourceTensor:
    """An HF tensor of this shape, or slice `index` of its first axis (an expert of fused ones)."""

    name: str
    shape: Shape
    index: int | None = None

    @property
    def piece_shape(self) -> Shape:
        return self.shape if self.index is None else self.shape[1:]

    @property
    def label(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    def place(self, box: Selection) -> Selection:
        """Return where a box of the piece lies in the whole HF tensor."""
        return box if self.index is None else (self.index, *box)


@dataclass(frozen=True)
class Row:
    """One piece of one mcore tensor and the HF tensors it is made of.

    Attributes:
        key: mcore sharded checkpoint key, the same for all pieces of a tensor.
        global_shape: shape of the whole mcore tensor, stacked axes first.
        offset: position of this piece on the stacked axes: (), (layer,), (expert,) or
            (layer, expert).
        sources: the HF tensors, in the order in which `rearrangement` numbers them.
        rearrangement: how the HF tensors become the piece.
        tp_axis: the axis of the piece that tensor parallelism cuts (ETP for an expert), or None
            if every rank holds the whole piece.
        tp_parts: number of equal parts along `tp_axis` that are each cut (2 for gate and up).
        layer, expert: the decoder layer and the expert that the piece belongs to; None outside.
    """

    key: str
    global_shape: Shape
    offset: Shape
    sources: tuple[SourceTensor, ...]
    rearrangement: Rearrangement
    tp_axis: int | None = None
    tp_parts: int = 1
    layer: int | None = None
    expert: int | None = None

    @property
    def shape(self) -> Shape:
        """Shape of this piece, without the stacked axes."""
        return self.global_shape[len(self.offset) :]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def to_mcore(self, *hf: Tensor) -> Tensor:
        """Make the piece, of shape `shape`, from HF pieces (each of its source's `piece_shape`)."""
        return self.rearrangement.to_mcore(*hf)

    def to_hf(self, mcore: Tensor) -> tuple[Tensor, ...]:
        """Make the HF pieces, one per source, from the whole piece; inverse of `to_mcore`."""
        return self.rearrangement.to_hf(mcore)

    def take(self, fetch: Callable[[str, Selection], Tensor], box: Box) -> Tensor:
        """Make `box` of the piece; ``fetch(name, box)`` returns that box of a whole HF tensor.

        Only what `box` covers is fetched.
        """

        def piece(number: int, part: Box) -> Tensor:
            return fetch(self.sources[number].name, self.sources[number].place(part))

        return self.rearrangement.take(piece, box)


def max_rows(row: Row, dtype: torch.dtype) -> int:
    """Return the most rows that one chunk of `row` may have; a transposed one is one chunk."""
    if row.rearrangement.transposed:
        return row.shape[0]
    width = row.numel // row.shape[0] * dtype.itemsize
    return max(CHUNK_BYTES // max(width, 1), 1)


def same(key: str, name: str, shape: Shape) -> Row:
    """Return the row of a tensor that is the same on both sides and not stacked."""
    return Row(key, shape, (), (SourceTensor(name, shape),), transforms.identity(shape[0]))


def table(
    architecture: Architecture,
    *,
    expert_layout: ExpertLayout | None = None,
    padded_vocab_size: int | None = None,
    head: forms.Head = forms.AS_CONFIG,
) -> list[Row]:
    """Return every row of a model, in the order of the network.

    Args:
        expert_layout: layout of the fused experts on the HF side; default: the one declared.
        padded_vocab_size: rows of the mcore embedding and output layer; default: not padded.
        head: the head on the HF side.

    Raises:
        BadInput: the expert layout of a MoE model is neither given nor declared, or the padded
            vocabulary is smaller than the vocabulary.
    """
    layout = expert_layout or architecture.expert_layout
    if any(architecture.moe_layers) and layout is None:
        raise BadInput(
            "config.json does not tell how the fused experts are laid out: it has none of "
            "transformers_version, rope_parameters, rope_scaling, num_experts, num_local_experts. "
            "Restore the config.json that was saved with the weights."
        )
    padded = padded_vocab_size or architecture.vocab_size
    if padded < architecture.vocab_size:
        raise BadInput(
            f"padded vocabulary {padded} is smaller than vocab_size {architecture.vocab_size}."
        )
    rows = [*vision_rows(architecture.vision), *_ends(architecture, padded, head)]
    for layer in range(architecture.num_hidden_layers):
        rows += _layer(architecture, layer, layout)
    return rows


def hf_shapes(rows: list[Row]) -> dict[str, Shape]:
    """Return the name and shape of every HF tensor that `rows` consume."""
    return {source.name: source.shape for row in rows for source in row.sources}


def extra_state_keys(a: Architecture) -> Iterator[str]:
    """Yield the keys of the ``_extra_state`` objects that strict loading looks for.

    Each Transformer Engine module has one (FP8 scales, or empty): linear layers, and norms that are
    not fused into a linear layer. The key ends in the position among layers and experts.
    """
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for layer in range(a.num_hidden_layers):
        moe = a.moe_layers[layer]
        attention = ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")
        modules = [f"self_attention.{module}" for module in attention]
        modules += ["pre_mlp_layernorm"] if moe else ["mlp.linear_fc1", "mlp.linear_fc2"]
        prefix = f"{LAYERS}{layer}." if a.mixed_layers else LAYERS
        place = [] if a.mixed_layers else [(layer, a.num_hidden_layers)]
        for module in modules:
            yield f"{prefix}{module}._extra_state/{shard(place or [(0, 1)])}"
        for expert in range(a.num_experts if moe else 0):
            for linear in ("linear_fc1", "linear_fc2"):
                end = shard([*place, (expert, a.num_experts)])
                yield f"{prefix}mlp.experts.experts.{linear}._extra_state/{end}"


def shard(place: list[tuple[int, int]]) -> str:
    """Return the end of mcore's ``ShardedObject.unique_key``: index, then size, of each axis."""
    return f"shard_{'.'.join(str(at) for at, _ in place)}_{'.'.join(str(n) for _, n in place)}"


def _ends(a: Architecture, padded: int, head: forms.Head) -> Iterator[Row]:
    """Yield the rows outside the layers: embedding, head and final norm."""
    vocabulary = [(EMBEDDING, forms.INPUT_EMBEDDING)]
    if head.kind == forms.TIED_COPY:
        vocabulary.append((EMBEDDING, forms.LM_HEAD))
    elif head.kind == forms.LANGUAGE_MODEL and not a.tie_word_embeddings:
        vocabulary.append(("output_layer.weight", forms.LM_HEAD))
    elif head.kind == forms.CLASSIFIER:
        yield same("output_layer.weight", forms.SCORE, (head.labels, a.hidden_size))
        if head.bias:
            yield same("output_layer.bias", forms.SCORE_BIAS, (head.labels,))
    how = transforms.pad_rows(a.vocab_size, padded)
    for key, name in vocabulary:
        source = SourceTensor(name, (a.vocab_size, a.hidden_size))
        yield Row(key, (padded, a.hidden_size), (), (source,), how, tp_axis=0)
    yield same("decoder.final_layernorm.weight", f"{TEXT}norm.weight", (a.hidden_size,))


@dataclass(frozen=True)
class _Layer:
    """One decoder layer and whether its tensors are stacked with those of other layers.

    mcore stacks the layers if all are alike. In a model with both MoE and dense layers, each layer
    has its own keys (``TransformerBlock.sharded_state_dict``, non-homogeneous layers).
    """

    index: int
    count: int
    stacked: bool

    def source(self, name: str, *shape: int) -> SourceTensor:
        return SourceTensor(f"{TEXT}layers.{self.index}.{name}.weight", shape)

    def row(
        self,
        key: str,
        shape: Shape,
        sources: tuple[SourceTensor, ...],
        how: Rearrangement,
        tp_axis: int | None = None,
        tp_parts: int = 1,
        expert: int | None = None,
        experts: int = 0,
    ) -> Row:
        stack, offset = ((self.count,), (self.index,)) if self.stacked else ((), ())
        if expert is not None:
            stack, offset = (*stack, experts), (*offset, expert)
        key = f"{LAYERS}{key}" if self.stacked else f"{LAYERS}{self.index}.{key}"
        shape = (*stack, *shape)
        return Row(
            key, shape, offset, sources, how, tp_axis, tp_parts, layer=self.index, expert=expert
        )

    def same(self, key: str, name: str, *shape: int, tp_axis: int | None = None) -> Row:
        """Return the row of HF's ``name.weight``, which is the same on both sides."""
        how = transforms.identity(shape[0])
        return self.row(key, shape, (self.source(name, *shape),), how, tp_axis)


def _layer(a: Architecture, index: int, layout: ExpertLayout | None) -> Iterator[Row]:
    layer = _Layer(index, a.num_hidden_layers, stacked=not a.mixed_layers)
    yield from _attention(a, layer)
    if a.moe_layers[index]:
        yield from _experts(a, layer, swapped=layout == "published")
    else:
        yield from _mlp(a, layer)


def _attention(a: Architecture, layer: _Layer) -> Iterator[Row]:
    hidden, d = a.hidden_size, a.head_dim
    query, kv = a.num_attention_heads * d, a.num_key_value_heads * d
    yield layer.same("self_attention.linear_qkv.layer_norm_weight", "input_layernorm", hidden)
    yield layer.row(
        "self_attention.linear_qkv.weight",
        (query + 2 * kv, hidden),
        (
            layer.source("self_attn.q_proj", query, hidden),
            layer.source("self_attn.k_proj", kv, hidden),
            layer.source("self_attn.v_proj", kv, hidden),
        ),
        transforms.qkv(a.num_attention_heads, a.num_key_value_heads, d),
        tp_axis=0,
    )
    yield layer.same("self_attention.q_layernorm.weight", "self_attn.q_norm", d)
    yield layer.same("self_attention.k_layernorm.weight", "self_attn.k_norm", d)
    key = "self_attention.linear_proj.weight"
    yield layer.same(key, "self_attn.o_proj", hidden, query, tp_axis=1)


def _mlp(a: Architecture, layer: _Layer) -> Iterator[Row]:
    hidden, ffn = a.hidden_size, a.intermediate_size
    yield layer.same("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden)
    gate, up = (layer.source(f"mlp.{name}", ffn, hidden) for name in ("gate_proj", "up_proj"))
    how = transforms.concatenate(ffn, ffn)
    yield layer.row("mlp.linear_fc1.weight", (2 * ffn, hidden), (gate, up), how, 0, tp_parts=2)
    yield layer.same("mlp.linear_fc2.weight", "mlp.down_proj", hidden, ffn, tp_axis=1)


def _experts(a: Architecture, layer: _Layer, *, swapped: bool) -> Iterator[Row]:
    hidden, ffn, count = a.hidden_size, a.moe_intermediate_size, a.num_experts
    yield layer.same("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden)
    yield layer.same("mlp.router.weight", "mlp.gate", count, hidden)
    fused = (
        ("linear_fc1", "gate_up_proj", (2 * ffn, hidden), 0, 2),
        ("linear_fc2", "down_proj", (hidden, ffn), 1, 1),
    )
    for linear, name, shape, tp_axis, tp_parts in fused:
        key = f"mlp.experts.experts.{linear}.weight"
        name = f"{TEXT}layers.{layer.index}.mlp.experts.{name}"
        stored = (count, *(shape[::-1] if swapped else shape))
        how = transforms.transpose(shape[0]) if swapped else transforms.identity(shape[0])
        for expert in range(count):
            sources = (SourceTensor(name, stored, expert),)
            yield layer.row(key, shape, sources, how, tp_axis, tp_parts, expert, count)


def vision_rows(v: VisionArchitecture) -> Iterator[Row]:
    """Yield the vision tower's rows: the same tensors, under ``visual.`` for ``model.visual.``."""
    for name, shape in _vision_shapes(v):
        yield same(f"visual.{name}", f"model.visual.{name}", shape)


def _vision_shapes(v: VisionArchitecture) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of the parameters of HF's ``Qwen3VLVisionModel``."""
    hidden, merged = v.hidden_size, v.hidden_size * v.spatial_merge_size**2
    patch = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    yield from _biased("patch_embed.", {"proj": (hidden, *patch)})
    yield "pos_embed.weight", (v.num_position_embeddings, hidden)
    block: dict[str, Shape] = {
        "norm1": (hidden,),
        "norm2": (hidden,),
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.linear_fc1": (v.intermediate_size, hidden),
        "mlp.linear_fc2": (hidden, v.intermediate_size),
    }
    for number in range(v.depth):
        yield from _biased(f"blocks.{number}.", block)
    linears = {"linear_fc1": (merged, merged), "linear_fc2": (v.out_hidden_size, merged)}
    # The first merger's norm precedes the patch merge; the others' follow it.
    yield from _biased("merger.", {"norm": (hidden,), **linears})
    for number in range(len(v.deepstack_visual_indexes)):
        yield from _biased(f"deepstack_merger_list.{number}.", {"norm": (merged,), **linears})


def _biased(prefix: str, weights: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    for name, shape in weights.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", shape[:1]
