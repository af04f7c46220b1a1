"""Attention: rotary positions for both layer specs, and the core attention of ``torch``.

Rotary positions
----------------

Interleaved multimodal rotary embedding: from 3-D position ids to rotated queries and keys.

Position ids are reduced to the rank's tokens before they come here, and
:class:`RotarySelfAttention` rotates queries and keys token by token as soon as they are projected.
Nothing later needs to know which positions a rank holds, so the same few lines serve CP, packing
and both layer specs. mcore's own packed path looks positions up again from cu_seqlens, with a host
sync in every layer. Transformer Engine's fused path counts from 0 in each sample, which is wrong
for 3-D positions.

A rotation is one kernel of Transformer Engine's, or three or four of torch's. Where our own kernel
runs (:mod:`mcore_qwen3vl.kernels.heads`), it norms and rotates queries and keys of the ``torch``
spec, and copies them and the values apart.

Core attention
--------------

Core attention of the ``torch`` layer spec: causal, grouped queries, CP and packed sequences.

Everything is one operation: causal attention of a run of queries over the run of keys that ends
with the last query. A sample is one such segment. Under CP it is two, one for each chunk of the
rank, with exactly the keys that its queries may see. An S x S mask is built only for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.kernels import fits
from mcore_qwen3vl.kernels.heads import HeadColumns, HeadNorms, split_heads
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.norm import StandaloneRMSNorm
from mcore_qwen3vl.model.inputs import local_positions, to_device
from mcore_qwen3vl.model.pointwise import Pointwise
from mcore_qwen3vl.model.recompute import compute_keeping_inputs, recipe_of, remember

label_module(__file__, "attention")

_KERNEL_TAKES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters  # since torch 2.12


def rope_frequencies(
    architecture: Architecture, rope_theta: float | None = None
) -> tuple[Tensor, float]:
    """Compute a model's rotary frequencies with HF's own class, or those of another base.

    Returns:
        The inverse frequencies, (R / 2,) float32 on the CPU, and the factor by which a scaled rope
        such as YaRN multiplies cosines and sines.
    """
    config = Qwen3VLTextConfig(
        head_dim=architecture.rotary_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            **dict(architecture.rope_scaling),
            "rope_theta": rope_theta or architecture.rope_theta,
        },
    )
    with torch.device("cpu"):  # a model built on the meta device still needs the values
        rope = Qwen3VLTextRotaryEmbedding(config)
    return rope.inv_freq.detach().clone(), float(rope.attention_scaling)


def rotary_factor(architecture: Architecture) -> float:
    """Return what cosines and sines are multiplied by."""
    # Where whole heads turn it is part of the softmax scale: see `transformer_config`.
    partial = architecture.rotary_dim < architecture.head_dim
    return rope_frequencies(architecture)[1] if partial else 1.0


class InterleavedMRoPE(nn.Module):
    """Rotary angles for queries and keys; replaces mcore's ``MultimodalRotaryEmbedding``.

    Of a model that turns only the first values of each head, these have angles, R in number.

    The frequencies of the temporal, height and width axes alternate (t h w t h w … t t); in mcore's
    each axis has a contiguous chunk. Source: HF ``Qwen3VLTextRotaryEmbedding``.

    For the factor of a scaled rope see :func:`rotary_factor`.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        # Plain attributes, because casting the module to bf16 would cast buffers too. Created on
        # the CPU, so that a model built on the meta device still has values.
        self.inverse_frequency, self.attention_scaling = rope_frequencies(architecture)
        self.axis = torch.zeros(len(self.inverse_frequency), dtype=torch.int64, device="cpu")
        # Axes 1 and 2 take every third frequency, as many as their section says; axis 0 the rest.
        for axis in (1, 2):
            self.axis[axis : architecture.mrope_section[axis] * 3 : 3] = axis

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute (S, B, 1, R) float32 angles in mcore's layout of (3, B, S) integer positions."""
        if self.axis.device != position_ids.device:
            self.axis = self.axis.to(position_ids.device)
            self.inverse_frequency = self.inverse_frequency.to(position_ids.device)
        positions = position_ids.float().index_select(0, self.axis)  # (R / 2, B, S)
        angles = positions.permute(2, 1, 0) * self.inverse_frequency  # (S, B, R / 2)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


def apply_rotary(x: Tensor, angles: Tensor, *, fused: bool, factor: float = 1.0) -> Tensor:
    """Rotate queries or keys of one rank's tokens.

    Args:
        x: (s, B, heads, D).
        angles: (s, B, 1, R) of the first R values of each head, from :class:`InterleavedMRoPE`.
            Their sines and cosines are computed once for all layers that receive this tensor, and
            rounded to the dtype of `x` as in HF.
        fused: whether to use Transformer Engine's kernel, which knows no factor.
        factor: what cosines and sines are multiplied by; the same for all layers.
    """
    if fused and factor == 1:
        return rotate_fused(x, angles)
    return rotate(x, *rotary_tables(angles, factor, x.dtype))


def rotary_tables(angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (s, B, 1, R / 2) of the angles; see :func:`apply_rotary`."""
    tables: tuple[Tensor, Tensor] | None = getattr(angles, "tables", None)
    if tables is None:
        half = angles[..., : angles.shape[-1] // 2]
        tables = (factor * half.cos()).to(dtype), (factor * half.sin()).to(dtype)
        angles.tables = tables  # type: ignore[attr-defined]
    return tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (S, B, heads, D), keeping only the tables for the backward pass.

    The tables are (S, B or 1, 1, R / 2), in the dtype to compute in. Source: HF
    ``apply_rotary_pos_emb`` of Qwen3-VL: the halves of R are the coordinates. Values of a head
    after the first R stay as they are.
    """
    turned: Tensor = _Rotate.apply(x, cos, sin)
    return turned


def rotate_fused(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (S, B, heads, D) with Transformer Engine's kernel, which computes in float32.

    The angles are (S, B or 1, 1, R) float32, the second half of R like the first. The kernel, too,
    keeps the values after the first R of a head.
    """
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    if angles.shape[1] == 1:
        return fused_apply_rotary_pos_emb(x, angles)
    # The kernel takes one row of angles for the whole batch, so each token becomes a position.
    tokens, of_tokens = x.flatten(0, 1).unsqueeze(1), angles.flatten(0, 1).unsqueeze(1)
    return fused_apply_rotary_pos_emb(tokens, of_tokens).view(x.shape)


class _Rotate(torch.autograd.Function):
    """Rotates; the backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1), None, None


@Pointwise
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    width = 2 * cos.shape[-1]
    halves = x[..., :width].unflatten(-1, (2, -1))  # (S, B, heads, 2, R / 2)
    first, second = halves.unbind(-2)
    turned = halves * cos.unsqueeze(-2)
    turned.select(-2, 0).addcmul_(second, sin, value=-sign)
    turned.select(-2, 1).addcmul_(first, sin, value=sign)
    turned = turned.flatten(-2).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


class HeadNorm(StandaloneRMSNorm):
    """The norm of queries or of keys; it gives its weights to a kernel that norms them itself.

    Megatron's overlapped parameter gather waits for weights when the module that owns them is
    called. So they are had by a call without a tensor.
    """

    def forward(self, x: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return self.weight if x is None else super().forward(x)


class RotarySelfAttention(SelfAttention):
    """mcore's attention, which here rotates queries and keys as soon as they are projected.

    Args:
        factor: see :func:`rotary_factor`.

    Attributes:
        splits_in_one_kernel: whether one kernel may do all between the projection and attention.
            If not, the norms of queries and keys are called with them, as a hook may want.
    """

    def __init__(self, *args: Any, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._factor = factor
        fused = self.config.transformer_impl == "transformer_engine"
        self._rotate = partial(apply_rotary, fused=fused, factor=factor)
        # With fewer groups than TP ranks, a rank takes its heads from the projections of several.
        has_groups = self.config.num_query_groups >= self.world_size
        self.splits_in_one_kernel = isinstance(self.q_layernorm, HeadNorm) and has_groups

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        self._angles = rotary_pos_emb
        try:
            return super().forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, output_gate: bool = False, **kwargs: Any
    ) -> Any:
        if self._angles is not None and self.splits_in_one_kernel and fits(hidden_states):
            return self._split_in_one_kernel(hidden_states, self._angles, gated=output_gate)
        query, key, *rest = super().get_query_key_value_tensors(
            hidden_states, *args, output_gate=output_gate, **kwargs
        )
        if self._angles is not None:
            query, key = (self._rotate_with_recipe(x, self._angles) for x in (query, key))
        return query, key, *rest

    def _split_in_one_kernel(self, hidden: Tensor, angles: Tensor, *, gated: bool) -> list[Tensor]:
        """Return queries, keys, values, and their gates, each (s, B, heads or groups, D).

        Each has a recipe, which computes all of them, once for the backward pass of attention.
        """
        projection, _bias = self.linear_qkv(hidden)  # (s, B, C)
        shape = projection.shape[:2]
        # A decoding step may have the same positions in all of its rows.
        cos, sin = (
            table.expand(*shape, 1, -1).flatten(0, 2)
            for table in rotary_tables(angles, self._factor, hidden.dtype)
        )
        columns = HeadColumns(
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
            gated=gated,
        )
        norm = self.q_layernorm
        norms = HeadNorms(norm(), self.k_layernorm(), norm.eps, norm.zero_centered)

        def split(rows: Tensor) -> list[Tensor]:
            parts = split_heads(rows, columns, cos, sin, norms)
            return [part.view(*shape, *part.shape[1:]) for part in parts]

        rows = projection.flatten(0, 1)
        kept, made = rows.detach(), dict[int, Tensor]()

        def make_again(number: int) -> Tensor:
            if number not in made:
                made.update(enumerate(split(kept)))
            return made.pop(number)

        return [remember(part, partial(make_again, i)) for i, part in enumerate(split(rows))]

    def _rotate_with_recipe(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate the output of a norm.

        If a recipe computes it again for the backward pass (:mod:`mcore_qwen3vl.model.recompute`),
        the result has one too: that recipe, then the rotation.
        """
        turned, recipe = self._rotate(x, angles), recipe_of(x)
        if recipe is None:
            return turned
        return remember(turned, lambda: self._rotate(recipe(), angles))

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply mcore's gate, and keep its inputs alone for the backward pass."""
        # A copy, because a view that is kept would keep the whole projection.
        return compute_keeping_inputs(super()._apply_output_gate, x, gate.contiguous())


@dataclass
class PackedSequence(PackedSeqParams):
    """mcore's packing parameters, with the samples' bounds on the host too."""

    bounds: tuple[int, ...] = ()  # from 0 to the full length, padding included

    @classmethod
    def from_params(cls, params: PackedSeqParams, device: torch.device) -> PackedSequence:
        """Complete `params` for both layer specs; `device` is that of the attention kernels.

        They have ``cu_seqlens_q``, or ``cu_seqlens_q_padded`` if samples end in padding, which then
        counts as part of them. On the host they cost nothing, on another device one host sync.
        """
        if isinstance(params, cls):
            return params
        padded = params.cu_seqlens_q_padded
        bounds = (params.cu_seqlens_q if padded is None else padded).to("cpu", torch.int32)
        cu_seqlens, longest = to_device(bounds, device), int(bounds.diff().max())
        # Padding that ends a sample is treated as part of it: causal attention alone keeps the
        # sample from attending to it. If Transformer Engine's ring attention knows of padding, it
        # reads log-sum-exps that its kernels do not write, and some releases mistake tokens for
        # padding (issues 1930 and 3331 of its repository).
        fields = {
            "qkv_format": "thd",
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_kv": cu_seqlens,
            "cu_seqlens_q_padded": None,
            "cu_seqlens_kv_padded": None,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
            "pad_between_seqs": None,
        }
        return cls(**{**vars(params), **fields}, bounds=tuple(bounds.tolist()))


@dataclass(frozen=True)
class Segments:
    """The runs of a rank's queries, and the keys that each run sees."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_rows: Tensor | None  # (sum of key_lengths,) rows of the gathered keys; None: all, in order
    device: torch.device

    @cached_property  # all layers of a micro-batch have these segments
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative query and key lengths, (segments + 1,) int32 each, on the device."""
        bounds = torch.tensor([self.query_lengths, self.key_lengths]).cumsum(1)
        queries, keys = to_device(F.pad(bounds, (1, 0)).int(), self.device)
        return queries, keys


@lru_cache(maxsize=16)  # every layer of a micro-batch makes the same call
def causal_segments(
    bounds: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device
) -> Segments:
    """Return the segments of the samples within `bounds` that this CP rank computes.

    The bounds are 0, and then the end of each sample. The keys of all CP ranks are gathered in
    order, and `Segments.key_rows` is used on `device`.
    """
    samples = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
    if cp_size == 1:
        lengths = tuple(stop - start for start, stop in samples)
        return Segments(lengths, lengths, None, device)
    query_lengths, key_lengths, keys = [], [], []
    for start, stop in samples:
        chunk = (stop - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            query_lengths.append(chunk)
            key_lengths.append((number + 1) * chunk)
            keys.append(torch.arange(start, start + key_lengths[-1]))
    # `argsort` gives, for each position, its row among the gathered keys.
    rows = gathered_positions(bounds, cp_size).argsort()[torch.cat(keys)]
    return Segments(tuple(query_lengths), tuple(key_lengths), to_device(rows, device), device)


def gathered_positions(bounds: tuple[int, ...], cp_size: int) -> Tensor:
    """Return the positions of all CP ranks' tokens, one rank after another: (S,) int64, host."""
    cu_seqlens = torch.tensor(bounds)
    return torch.cat(
        [
            local_positions(bounds[-1], cp_size=cp_size, cp_rank=rank, cu_seqlens=cu_seqlens)
            for rank in range(cp_size)
        ]
    )


class TorchAttention(MegatronModule):
    """``core_attention`` without Transformer Engine; mcore's own has neither CP nor packing.

    Under CP the keys and values of all ranks are gathered, and their gradients are summed and
    scattered back, so each rank computes attention for its own queries only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute causal attention: a query sees the keys of its own sample up to itself.

        Args:
            query: (s, B, heads, D) queries of this rank's positions, or (t, heads, D) packed.
            key: (s, B, groups, D) or (t, groups, D).
            value: the same shape as `key`.
            attention_mask: (B, S) bool, True for tokens and False for padding, or None.

        Returns:
            (s, B, heads * D), or (t, heads * D) packed.
        """
        packed = packed_seq_params is not None
        size, rank = self.cp_group.size(), self.cp_group.rank()
        bounds: tuple[int, ...] = (0, len(key) * size)
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            bounds = PackedSequence.from_params(packed_seq_params, query.device).bounds
        segments = causal_segments(bounds, size, rank, query.device)
        if size > 1:
            # One collective for both; its backward reduces and scatters.
            pair = torch.cat([key, value], dim=-1)
            pair = gather_from_sequence_parallel_region(pair, group=self.cp_group)
            key, value = pair.index_select(0, segments.key_rows).chunk(2, dim=-1)
        if packed and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            # An index in place of `squeeze` has a backward that copies into zeros.
            query, key, value = (x.squeeze(1) for x in (query, key, value))
            output = self._attend_in_one_kernel(query, key, value, segments).unsqueeze(1)
        else:
            output = self._attend_by_segment(query, key, value, segments, attention_mask)
        output = output.flatten(2)  # (s, B, heads * D)
        return output.squeeze(1) if packed else output

    def _attend_by_segment(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, valid: Tensor | None
    ) -> Tensor:
        """Return (s, B, heads, D), from one SDPA call per segment."""
        # A decoding step has fewer queries than keys; they are the last ones.
        is_single = len(segments.query_lengths) == 1
        lengths = (len(query),) if is_single else segments.query_lengths
        outputs = []
        for q, k, v in zip(
            query.split(lengths),
            key.split(segments.key_lengths),
            value.split(segments.key_lengths),
            strict=True,
        ):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (B, heads, s, D)
            queries, keys = q.shape[2], k.shape[2]
            # SDPA's own causal mask is aligned at the first key, so it serves equal lengths only.
            plain = queries == keys and valid is None
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else _mask(queries, keys, valid),
                is_causal=plain,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            outputs.append(output.permute(2, 0, 1, 3))
        return torch.cat(outputs)

    def _attend_in_one_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        """Return (t, heads, D), computing all segments in one kernel."""
        cu_seq_q, cu_seq_k = segments.cu_seqlens
        grouped: dict[str, Any] = {"enable_gqa": True}
        if not _KERNEL_TAKES_GROUPS:
            grouped, groups = {}, query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        output = varlen_attn(
            query,
            key.contiguous(),
            value.contiguous(),
            cu_seq_q,
            cu_seq_k,
            max(segments.query_lengths),
            max(segments.key_lengths),
            scale=self.softmax_scale,
            window_size=(-1, 0),  # causal, aligned at the last key
            **grouped,
        )
        assert isinstance(output, Tensor)  # no auxiliary output was asked for
        return output


def _mask(queries: int, keys: int, valid: Tensor | None) -> Tensor | None:
    """Return the mask of the last `queries` of `keys` positions: nothing later, and no padding."""
    if valid is None:  # the last position alone sees everything
        return causal_lower_right(queries, keys) if queries > 1 else None
    position = torch.arange(keys, device=valid.device)
    row = position[keys - queries :, None]  # (queries, 1)
    seen = (position <= row) & valid[:, None, None, :keys]  # (B, 1, queries, keys)
    # A padding query sees itself: a row without any key would be NaN.
    return seen | (position == row)
