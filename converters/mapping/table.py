"""The table: which Hugging Face tensors make which Megatron-Core tensor, and how.

Offline conversion, live load, export, verification and inspection all read it; there is no second
mapping. mcore names are the keys of ``sharded_state_dict()`` with Transformer Engine's names.
megatron-core also writes these keys to a ``torch_dist`` checkpoint: layers that are alike are
stacked on the first axis, and experts on the next. A row is one piece of such a tensor: one layer,
or one expert of one layer. An HF tensor may make several mcore tensors, which then have a part of
its rows each.

The `Rearrangement` of a row says how, and has an exact inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from mcore_qwen3vl.config import (
    NO_VISION,
    Architecture,
    DeltaNetArchitecture,
    ExpertLayout,
    VisionArchitecture,
)
from mcore_qwen3vl.converters.mapping import forms
from mcore_qwen3vl.converters.mapping.rearrangement import (
    Rearrangement,
    concatenate,
    identity,
    pad_rows,
    qkv,
    transpose,
)
from mcore_qwen3vl.converters.storage.boxes import Box, Selection, Shape
from mcore_qwen3vl.errors import BadInput

TEXT = "model.language_model."
EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = "decoder.layers."
"""Prefix of the keys of all decoder layers."""
MTP = "mtp."
"""Prefix, on both sides, of the MTP layers."""
PUBLISHED_IN_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of names of the tensors that Qwen3.5's checkpoints have in float32, beside bfloat16."""

EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert in the tensors of fused ones."""

CHUNK_BYTES = 16 * 2**20
"""Tensors move in pieces of this size, except a transposed expert, which moves whole."""


@dataclass(frozen=True)
class SourceTensor:
    """A piece of an HF tensor, by default all of it.

    Attributes:
        shape: shape of the whole tensor.
        index: the piece is this slice of the first axis (an expert of fused ones).
        rows: the piece is the rows from the first number to before the second; of slice `index`,
            if that is given.
        alone: name of the piece where it is written as a tensor of its own.
    """

    name: str
    shape: Shape
    index: int | None = None
    rows: tuple[int, int] | None = None
    alone: str = ""

    @property
    def piece_shape(self) -> Shape:
        shape = self.shape if self.index is None else self.shape[1:]
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])

    @property
    def written_name(self) -> str:
        """The name of the tensor in which the piece is written."""
        return self.alone or self.name

    @property
    def written_shape(self) -> Shape:
        """The shape of that tensor."""
        return self.piece_shape if self.alone else self.shape

    @property
    def piece(self) -> int | tuple[int, int] | None:
        """Which piece this is of those with a checksum; None: the whole tensor, or one alone."""
        if self.alone:
            return None
        return self.rows if self.index is None else self.index

    @property
    def piece_words(self) -> str:
        """The piece in words, after a tensor's name: `` in expert 3``; empty for all of it."""
        if self.index is not None:
            return f" in expert {self.index}"
        return "" if self.rows is None else f" in rows {self.rows[0]} to {self.rows[1] - 1}"

    @property
    def label(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    @property
    def first_value(self) -> int:
        """The number of values of the whole tensor that precede the piece."""
        first_row = 0 if self.rows is None else self.rows[0]
        slices = (self.index or 0) * prod(self.shape[1:])
        return slices + first_row * prod(self.shape[1 + (self.index is not None) :])

    def place(self, box: Selection) -> Selection:
        """Return where a box of the piece lies in the whole HF tensor."""
        if self.rows is not None and box:
            rows, first = box[0], self.rows[0]
            assert isinstance(rows, slice)
            box = (slice(first + rows.start, first + rows.stop), *box[1:])
        elif self.rows is not None:  # an empty box is the whole piece
            box = (slice(*self.rows),)
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
            if every rank holds the whole piece. The legacy format and counts need it; on a running
            model its ``sharded_state_dict`` divides.
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


def unchanged_row(key: str, name: str, shape: Shape) -> Row:
    """Return the row of a tensor that is the same on both sides and not stacked."""
    return Row(key, shape, (), (SourceTensor(name, shape),), identity(shape[0]))


def table(
    architecture: Architecture,
    *,
    expert_layout: ExpertLayout | None = None,
    padded_vocab_size: int | None = None,
    head: forms.HeadForm = forms.AS_CONFIG,
    mtp: bool = False,
) -> list[Row]:
    """Return every row of a model, in the order of the network.

    Args:
        expert_layout: layout of the fused experts on the HF side; default: the one declared.
        padded_vocab_size: rows of the mcore embedding and output layer; default: not padded.
        head: the head on the HF side.
        mtp: whether to include the MTP layer, if the config names one;
            a running model has it if it trains it.

    Raises:
        BadInput: the expert layout of a MoE model is neither given nor declared, or the padded
            vocabulary is smaller than the vocabulary.
    """
    layout = architecture.layout_of_experts(expert_layout)
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
    rows = [*vision_rows(architecture.vision), *_rows_outside_layers(architecture, padded, head)]
    for layer in range(architecture.num_hidden_layers):
        rows += _layer(architecture, layer, layout)
    if mtp and architecture.mtp_num_hidden_layers:
        rows += _mtp_rows(architecture, layout)
    return rows


def split_experts(rows: Iterable[Row], starts: tuple[str, ...]) -> list[Row]:
    """Return `rows` where each matrix of an expert is a tensor of its own on the HF side.

    Args:
        starts: how the names of the tensors of fused experts start that are so written. They have
            the layout ``v5``: the rows of each expert are those of its matrices.
    """
    split = []
    for row in rows:
        fused = row.sources[0]
        if row.expert is not None and fused.name.startswith(starts):
            experts, _, name = fused.name.rpartition(".")
            height = row.shape[0] // len(EXPERT_MATRICES[name])
            sources = []
            for number, matrix in enumerate(EXPERT_MATRICES[name]):
                alone = f"{experts}.{fused.index}.{matrix}.weight"
                rows_of_fused = (number * height, (number + 1) * height)
                sources.append(replace(fused, rows=rows_of_fused, alone=alone))
            how = concatenate(*(height for _ in sources))
            row = replace(row, sources=tuple(sources), rearrangement=how)
        split.append(row)
    return split


def hf_shapes(rows: list[Row]) -> dict[str, Shape]:
    """Return the name and shape of every HF tensor that `rows` consume."""
    return {source.name: source.shape for row in rows for source in row.sources}


def unstacked(row: Row) -> Row:
    """Return `row` with the key that it has where each layer has keys of its own."""
    if row.layer is None or row.key.startswith(f"{LAYERS}{row.layer}."):
        return row
    key = f"{LAYERS}{row.layer}.{row.key.removeprefix(LAYERS)}"
    return replace(row, key=key, global_shape=row.global_shape[1:], offset=row.offset[1:])


def extra_state_keys(a: Architecture, *, mtp: bool = False, stacked: bool = True) -> Iterator[str]:
    """Yield the keys of the ``_extra_state`` objects that strict loading looks for.

    Each Transformer Engine module has one (FP8 scales, or empty): linear layers, and norms that are
    not fused into a linear layer. The key ends in the position among layers and experts. `mtp` is
    as in `table`; unless `stacked`, each layer has keys of its own.
    """
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    stacked = stacked and a.stacks_layers
    for layer in range(a.num_hidden_layers):
        prefix = LAYERS if stacked else f"{LAYERS}{layer}."
        place = [(layer, a.num_hidden_layers)] if stacked else []
        moe, delta_net = a.moe_layers[layer], a.delta_net_layers[layer]
        yield from _extra_state_keys_of_layer(a, prefix, place, moe=moe, delta_net=delta_net)
    if mtp:
        for module in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
            yield f"{MTP}layers.0.{module}._extra_state/shard_0_1"
        yield from _extra_state_keys_of_layer(a, _MTP_LAYER, [], moe=a.is_moe, delta_net=False)


def _extra_state_keys_of_layer(
    a: Architecture, prefix: str, place: list[tuple[int, int]], *, moe: bool, delta_net: bool
) -> Iterator[str]:
    attention = ["linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"]
    if delta_net:
        attention = ["in_proj", "out_norm", "out_proj"]
    modules = [f"self_attention.{module}" for module in attention]
    modules += ["pre_mlp_layernorm"] if moe else ["mlp.linear_fc1", "mlp.linear_fc2"]
    if moe and a.shared_expert_intermediate_size:
        modules += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    for module in modules:
        yield f"{prefix}{module}._extra_state/{shard_suffix(place or [(0, 1)])}"
    for expert in range(a.num_experts if moe else 0):
        for linear in ("linear_fc1", "linear_fc2"):
            end = shard_suffix([*place, (expert, a.num_experts)])
            yield f"{prefix}mlp.experts.experts.{linear}._extra_state/{end}"


def shard_suffix(place: list[tuple[int, int]]) -> str:
    """Return the end of mcore's ``ShardedObject.unique_key``: index, then size, of each axis."""
    return f"shard_{'.'.join(str(at) for at, _ in place)}_{'.'.join(str(n) for _, n in place)}"


def _rows_outside_layers(a: Architecture, padded: int, head: forms.HeadForm) -> Iterator[Row]:
    """Yield the rows outside the layers: embedding, head and final norm."""
    vocabulary = [(EMBEDDING, forms.INPUT_EMBEDDING)]
    if head.kind == forms.TIED_COPY:
        vocabulary.append((EMBEDDING, forms.LM_HEAD))
    elif head.kind == forms.LANGUAGE_MODEL and not a.tie_word_embeddings:
        vocabulary.append(("output_layer.weight", forms.LM_HEAD))
    elif head.kind == forms.CLASSIFIER:
        yield unchanged_row("output_layer.weight", forms.SCORE, (head.labels, a.hidden_size))
        if head.bias:
            yield unchanged_row("output_layer.bias", forms.SCORE_BIAS, (head.labels,))
    how = pad_rows(a.vocab_size, padded)
    for key, name in vocabulary:
        source = SourceTensor(name, (a.vocab_size, a.hidden_size))
        yield Row(key, (padded, a.hidden_size), (), (source,), how, tp_axis=0)
    yield unchanged_row("decoder.final_layernorm.weight", f"{TEXT}norm.weight", (a.hidden_size,))


@dataclass(frozen=True)
class _Layer:
    """One decoder layer and whether its tensors are stacked with those of other layers.

    mcore stacks the layers if all are alike. In a model with layers of several kinds, each layer
    has its own keys (``TransformerBlock.sharded_state_dict``, non-homogeneous layers).

    Attributes:
        hf, mcore: prefixes of the layer's tensors that replace the decoder's.
    """

    index: int
    count: int
    stacked: bool
    hf: str = ""
    mcore: str = ""

    def hf_name(self, name: str) -> str:
        """Return HF's name of a tensor of the layer."""
        return f"{self.hf or f'{TEXT}layers.{self.index}.'}{name}"

    def source(self, name: str, *shape: int) -> SourceTensor:
        return SourceTensor(self.hf_name(f"{name}.weight"), shape)

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
        prefix = self.mcore or (LAYERS if self.stacked else f"{LAYERS}{self.index}.")
        layer = None if self.mcore else self.index
        shape = (*stack, *shape)
        return Row(
            prefix + key, shape, offset, sources, how, tp_axis, tp_parts, layer=layer, expert=expert
        )

    def unchanged_row(self, key: str, name: str, *shape: int, tp_axis: int | None = None) -> Row:
        """Return the row of HF's ``name.weight``, which is the same on both sides."""
        how = identity(shape[0])
        return self.row(key, shape, (self.source(name, *shape),), how, tp_axis)


def _layer(a: Architecture, index: int, layout: ExpertLayout | None) -> Iterator[Row]:
    """Yield the rows of a decoder layer."""
    layer = _Layer(index, a.num_hidden_layers, stacked=a.stacks_layers)
    if a.delta_net is not None and a.delta_net_layers[index]:
        yield from _delta_net_rows(a, a.delta_net, layer)
    else:
        yield from _attention_rows(a, layer)
    if a.moe_layers[index]:
        yield from _expert_rows(a, layer, swapped=layout == "published")
    else:
        yield from _mlp_rows(a, layer)


# The GPT model's MTP block calls the module mtp_model_layer, and keeps this name of checkpoints
# (``MultiTokenPredictionLayer.sharded_state_dict``).
_MTP_LAYER = f"{MTP}layers.0.transformer_layer."


def _mtp_rows(a: Architecture, layout: ExpertLayout | None) -> Iterator[Row]:
    """Yield the rows of the MTP layer, as Megatron's MTP block has them.

    It joins the embedding of a token with the state of the one before. Source of HF's names:
    vLLM's ``Qwen3_5MultiTokenPredictor``, since transformers leaves these tensors out.
    """
    hidden, block = a.hidden_size, f"{MTP}layers.0."
    norms = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    for key, name in (norms | {"final_layernorm": "norm"}).items():
        yield unchanged_row(f"{block}{key}.weight", f"{MTP}{name}.weight", (hidden,))
    yield replace(
        unchanged_row(f"{block}eh_proj.weight", f"{MTP}fc.weight", (hidden, 2 * hidden)), tp_axis=0
    )
    layer = _Layer(0, 1, stacked=False, hf=block, mcore=_MTP_LAYER)
    yield from _attention_rows(a, layer)
    if a.is_moe:
        yield from _expert_rows(a, layer, swapped=layout == "published")
    else:
        yield from _mlp_rows(a, layer)


def _attention_rows(a: Architecture, layer: _Layer) -> Iterator[Row]:
    hidden, d = a.hidden_size, a.head_dim
    query, kv = a.num_attention_heads * d, a.num_key_value_heads * d
    projected = query * (2 if a.attn_output_gate else 1)
    yield layer.unchanged_row(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm", hidden
    )
    yield layer.row(
        "self_attention.linear_qkv.weight",
        (projected + 2 * kv, hidden),
        (
            layer.source("self_attn.q_proj", projected, hidden),
            layer.source("self_attn.k_proj", kv, hidden),
            layer.source("self_attn.v_proj", kv, hidden),
        ),
        qkv(a.num_attention_heads, a.num_key_value_heads, d, gated=a.attn_output_gate),
        tp_axis=0,
    )
    yield layer.unchanged_row("self_attention.q_layernorm.weight", "self_attn.q_norm", d)
    yield layer.unchanged_row("self_attention.k_layernorm.weight", "self_attn.k_norm", d)
    key = "self_attention.linear_proj.weight"
    yield layer.unchanged_row(key, "self_attn.o_proj", hidden, query, tp_axis=1)


def _delta_net_rows(a: Architecture, net: DeltaNetArchitecture, layer: _Layer) -> Iterator[Row]:
    """Yield the rows of a gated delta net.

    mcore keeps apart what a parameter joins, because TP cuts each part (``GatedDeltaNet``).
    """
    hidden, heads, qk, v = a.hidden_size, net.num_value_heads, net.key_dim, net.value_dim
    prefix, joined = "self_attention.", 2 * qk + v
    yield layer.unchanged_row(f"{prefix}in_proj.layer_norm_weight", "input_layernorm", hidden)
    for key, source_tensor in (
        ("in_proj", layer.source("linear_attn.in_proj_qkv", joined, hidden)),
        ("conv1d", layer.source("linear_attn.conv1d", joined, 1, net.conv_kernel_dim)),
    ):
        for part, rows in (("query", (0, qk)), ("key", (qk, 2 * qk)), ("value", (2 * qk, joined))):
            source = replace(source_tensor, rows=rows)
            shape, how = source.piece_shape, identity(rows[1] - rows[0])
            yield layer.row(f"{prefix}{key}.weight.{part}", shape, (source,), how, tp_axis=0)
    for part, name, count in (("z", "z", v), ("beta", "b", heads), ("alpha", "a", heads)):
        key = f"{prefix}in_proj.weight.{part}"
        yield layer.unchanged_row(key, f"linear_attn.in_proj_{name}", count, hidden, tp_axis=0)
    for name in ("A_log", "dt_bias"):
        source = SourceTensor(layer.hf_name(f"linear_attn.{name}"), (heads,))
        how = identity(heads)
        yield layer.row(f"{prefix}{name}", (heads,), (source,), how, tp_axis=0)
    yield layer.unchanged_row(f"{prefix}out_norm.weight", "linear_attn.norm", net.value_head_dim)
    yield layer.unchanged_row(
        f"{prefix}out_proj.weight", "linear_attn.out_proj", hidden, v, tp_axis=1
    )


def _mlp_rows(a: Architecture, layer: _Layer) -> Iterator[Row]:
    key = "mlp.linear_fc1.layer_norm_weight"
    yield layer.unchanged_row(key, "post_attention_layernorm", a.hidden_size)
    yield from _gated_linear_rows(a, layer, "mlp.", "mlp.", a.intermediate_size)


def _gated_linear_rows(
    a: Architecture, layer: _Layer, key: str, name: str, ffn: int
) -> Iterator[Row]:
    hidden = a.hidden_size
    gate, up = (layer.source(f"{name}{linear}", ffn, hidden) for linear in ("gate_proj", "up_proj"))
    how = concatenate(ffn, ffn)
    yield layer.row(f"{key}linear_fc1.weight", (2 * ffn, hidden), (gate, up), how, 0, tp_parts=2)
    yield layer.unchanged_row(f"{key}linear_fc2.weight", f"{name}down_proj", hidden, ffn, tp_axis=1)


def _expert_rows(a: Architecture, layer: _Layer, *, swapped: bool) -> Iterator[Row]:
    hidden, ffn, count = a.hidden_size, a.moe_intermediate_size, a.num_experts
    yield layer.unchanged_row("pre_mlp_layernorm.weight", "post_attention_layernorm", hidden)
    yield layer.unchanged_row("mlp.router.weight", "mlp.gate", count, hidden)
    if shared := a.shared_expert_intermediate_size:
        key = "mlp.shared_experts."
        yield from _gated_linear_rows(a, layer, key, "mlp.shared_expert.", shared)
        yield layer.unchanged_row(f"{key}gate_weight", "mlp.shared_expert_gate", 1, hidden)
    fused = (
        ("linear_fc1", "gate_up_proj", (2 * ffn, hidden), 0, 2),
        ("linear_fc2", "down_proj", (hidden, ffn), 1, 1),
    )
    for linear, name, shape, tp_axis, tp_parts in fused:
        key = f"mlp.experts.experts.{linear}.weight"
        name = layer.hf_name(f"mlp.experts.{name}")
        stored = (count, *(shape[::-1] if swapped else shape))
        how = transpose(shape[0]) if swapped else identity(shape[0])
        for expert in range(count):
            sources = (SourceTensor(name, stored, expert),)
            yield layer.row(key, shape, sources, how, tp_axis, tp_parts, expert, count)


def vision_rows(v: VisionArchitecture) -> Iterator[Row]:
    """Yield the vision tower's rows: the same tensors, under ``visual.`` for ``model.visual.``."""
    for name, shape in _vision_shapes(v) if v != NO_VISION else ():
        yield unchanged_row(f"visual.{name}", f"model.visual.{name}", shape)


def _vision_shapes(v: VisionArchitecture) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of the parameters of HF's ``Qwen3VLVisionModel``."""
    hidden, merged = v.hidden_size, v.hidden_size * v.spatial_merge_size**2
    patch = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    yield from _with_biases("patch_embed.", {"proj": (hidden, *patch)})
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
        yield from _with_biases(f"blocks.{number}.", block)
    linears = {"linear_fc1": (merged, merged), "linear_fc2": (v.out_hidden_size, merged)}
    # The first merger's norm precedes the patch merge; the others' follow it.
    yield from _with_biases("merger.", {"norm": (hidden,), **linears})
    for number in range(len(v.deepstack_visual_indexes)):
        yield from _with_biases(f"deepstack_merger_list.{number}.", {"norm": (merged,), **linears})


def _with_biases(prefix: str, weights: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    for name, shape in weights.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", shape[:1]
