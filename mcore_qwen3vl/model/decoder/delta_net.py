"""Gated delta nets, which replace attention in most layers of Qwen3.5.

Megatron-Core's module with a forward pass of our own. Megatron's waits for the device four or five
times a layer when samples are packed, sees no padding, computes the decay in the dtype of the
weights and cannot decode. Parameters, their division over TP and their checkpoint keys are its own.

Under CP an all-to-all gives each rank all tokens of some of its heads, and another takes them back.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    common,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.attention import PackedSequence, gathered_positions
from mcore_qwen3vl.model.decoder.delta_rule import CHUNK, causal_convolution, gated_delta_rule
from mcore_qwen3vl.model.inputs import local_positions, to_device
from mcore_qwen3vl.model.recompute import compute_keeping_inputs

label_module(__file__, "gated delta nets")

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes in which flash-linear-attention's kernels compute, on a GPU; they refuse float32."""


class DeltaNet(GatedDeltaNet):
    """A gated delta net under any layout. Source: HF ``Qwen3_5GatedDeltaNet``.

    Half precision on a GPU needs flash-linear-attention. Everything else, and the deterministic
    mode, whose results its kernels do not repeat, uses plain torch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Megatron's needs flash-linear-attention even where its kernels are not called.
        with mock.patch.object(common, "HAVE_FLA", True):
            super().__init__(config, submodules, *args, **kwargs)
        plain = copy(config)
        plain.layernorm_zero_centered_gamma = False  # this norm's weight is around one in HF
        self.out_norm = build_module(
            submodules.out_norm,
            config=plain,
            hidden_size=self.value_head_dim,
            eps=config.layernorm_epsilon,
        )
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each rank norms its own heads, so the gradient is the sum over TP. Megatron sums up
            # only those of q_layernorm and k_layernorm, but takes the mean of what is marked.
            weight, size = self.out_norm.weight, self.tp_size
            weight.average_gradients_across_tp_domain = True
            weight.register_hook(lambda gradient: gradient * size)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule  # None would be refused; Megatron's forward has it

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute (s_local, B, H) from this rank's (s_local, B, H), and no bias.

        Args:
            attention_mask: (B, cached + S) bool, True for tokens and False for padding, or None. It
                matters where padding comes before tokens.
            inference_context: cache in which the layer's state is kept between calls. It is the
                last K - 1 inputs of the convolution, (B, K - 1, channels), and the rule's state,
                (B, heads, key_head_dim, value_head_dim) float32, instead of keys and values.
            packed_seq_params: samples that are kept apart.
        """
        cp = self.pg_collection.cp
        if attention_mask is not None:
            hidden_states = self._zero_out_padding(hidden_states, attention_mask)
        inputs, _bias = self.in_proj(hidden_states)  # (s, B, ...)
        length = len(inputs) * self.cp_size
        bounds: tuple[int, ...] = (0, length)
        packed = None
        if packed_seq_params is not None:
            packed = PackedSequence.from_params(packed_seq_params, inputs.device)
            bounds = packed.bounds
        if self.cp_size > 1:
            sections = self.in_proj_split_sections
            columns = common._build_head_perm_for_split_sections(sections, cp.size(), inputs.device)
            inputs = tensor_a2a_cp2hp(
                inputs.index_select(-1, columns), 0, -1, cp, undo_attention_load_balancing=False
            )
            # The all-to-all gives one rank's tokens after another's, so they are put in order.
            in_order, of_ranks = _sequence_orders(bounds, self.cp_size, inputs.device)
            inputs = inputs.index_select(0, in_order)
        parts = inputs.transpose(0, 1).split(self.feat_dim_split, dim=-1)
        # Copies, because a view that is kept would keep the whole projection.
        qkv, gate, beta, alpha = (part.contiguous() for part in parts)
        earlier, state = self._cached_state(inference_context)
        plain = not qkv.is_cuda or qkv.dtype not in KERNEL_DTYPES or self.config.deterministic_mode
        convolve, apply_rule = _PLAIN if plain else _KERNELS
        samples = bounds if plain else packed
        # The filters of this rank's heads under CP, (channels, K).
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        filters = get_parameter_local_cp(self.conv1d.weight, 0, cp, sections).squeeze(1)
        convolved = convolve(qkv, filters, samples, earlier)
        query, key, value = self._split_into_heads(convolved)
        # As in HF, also in half precision: in bf16, exp(A_log) would change the decay by 0.3 %.
        rate, shift = (get_parameter_local_cp(p, 0, cp) for p in (self.A_log, self.dt_bias))
        wide = torch.promote_types(alpha.dtype, torch.float32)
        log_decay = -rate.to(wide).exp() * F.softplus(alpha.to(wide) + shift)
        output, state = apply_rule(query, key, value, log_decay, beta.sigmoid(), samples, state)
        if inference_context is not None:
            self._cache_state(inference_context, qkv, earlier, state)
        normed = self._gated_norm(output, gate)
        if self.cp_size > 1:
            normed = tensor_a2a_hp2cp(
                normed.index_select(0, of_ranks), 0, -1, cp, redo_attention_load_balancing=False
            )
        result: tuple[Tensor, Tensor | None] = self.out_proj(normed)
        return result

    def _zero_out_padding(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Set padding's rows of `hidden`, (s_local, B, H), to zero, so that the state stays zero.

        The mask, (B, S), is nonzero at tokens.
        """
        parallel = self.config.sequence_parallel
        length = len(hidden) * self.cp_size * (self.tp_size if parallel else 1)
        rows = local_positions(
            length,
            cp_size=self.cp_size,
            cp_rank=self.pg_collection.cp.rank(),
            tp_size=self.tp_size,
            tp_rank=self.tp_group.rank(),
            sequence_parallel=parallel,
        )
        # The mask also has the tokens before these that a cached call does not compute again.
        valid = attention_mask[:, -length:].index_select(1, to_device(rows, hidden.device))
        return hidden * valid.T.unsqueeze(-1).to(hidden.dtype)

    def _split_into_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (B, S, heads, ...), of (B, S, channels)."""
        keys, values = self.qk_dim_local_tp // self.cp_size, self.v_dim_local_tp // self.cp_size
        query, key, value = convolved.split((keys, keys, values), dim=-1)
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        return query, key, value.unflatten(-1, (-1, self.value_head_dim))

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return (S, B, values) from the rule's output, (B, S, heads, V), and (B, S, values)."""
        batch, length = gate.shape[:2]

        def compute(output: Tensor, gate: Tensor) -> Tensor:
            gates = gate.reshape(-1, self.value_head_dim)
            normed = self._apply_gated_norm(output, gates).view(batch, length, -1)
            return normed.transpose(0, 1).contiguous()

        return compute_keeping_inputs(compute, output, gate)

    def _cached_state(self, context: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the convolution's last inputs and the rule's state; None before a token."""
        if context is None:
            return None, None
        states: dict[int, tuple[Tensor, Tensor]] = context.key_value_memory_dict
        return states.get(self.layer_number, (None, None))

    def _cache_state(
        self, context: Any, qkv: Tensor, earlier: Tensor | None, state: Tensor
    ) -> None:
        """Keep in the cache what :meth:`_cached_state` returns in the next call."""
        if earlier is None:
            earlier = qkv.new_zeros(len(qkv), self.conv_kernel_dim - 1, qkv.shape[-1])
        # The last K - 1 inputs, which a filter of K values needs before the next token.
        last = torch.cat((earlier, qkv), 1)[:, 1 - self.conv_kernel_dim :]
        context.key_value_memory_dict[self.layer_number] = last, state


@lru_cache(maxsize=16)  # every layer of a micro-batch makes the same call
def _sequence_orders(
    bounds: tuple[int, ...], cp_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the places in the ranks' tokens of all positions in order, and its inverse."""
    of_ranks = gathered_positions(bounds, cp_size)
    return to_device(of_ranks.argsort(), device), to_device(of_ranks, device)


def _convolve_by_kernel(
    x: Tensor, weight: Tensor, packed: PackedSequence | None, earlier: Tensor | None
) -> Tensor:
    """Apply :func:`causal_convolution` to half precision on a GPU."""
    from fla.modules.causal_conv1d import causal_conv1d

    inputs = x if earlier is None else torch.cat((earlier, x), 1)
    output, _ = causal_conv1d(
        inputs.contiguous(), weight, activation="silu", **_packing_arguments(packed)
    )
    return output[:, inputs.shape[1] - x.shape[1] :]


def _delta_rule_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    packed: PackedSequence | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Apply :func:`gated_delta_rule` to half precision on a GPU."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    kernel = chunk_gated_delta_rule if query.shape[1] > 1 else fused_recurrent_gated_delta_rule
    output, state = kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        g=log_decay,
        beta=beta,
        initial_state=state,
        # Of packed samples nobody keeps the states, one for each.
        output_final_state=packed is None and not torch.is_grad_enabled(),
        use_qk_l2norm_in_kernel=True,
        **_packing_arguments(packed),
    )
    return output, state


def _packing_arguments(packed: PackedSequence | None) -> dict[str, Tensor]:
    """Return a kernel's arguments for packed samples; it would copy such indices with a wait."""
    if packed is None:
        return {}
    bounds = packed.cu_seqlens_q
    return {"cu_seqlens": bounds, "chunk_indices": _chunk_indices(packed.bounds, bounds.device)}


@lru_cache(maxsize=16)  # every layer of a micro-batch makes the same call
def _chunk_indices(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the sample of each chunk and its place among that sample's, (chunks, 2) int32."""
    counts = (-(-(stop - start) // CHUNK) for start, stop in pairwise(bounds))
    places = [(sample, n) for sample, count in enumerate(counts) for n in range(count)]
    return to_device(torch.tensor(places, dtype=torch.int32), device)


_PLAIN: tuple[Any, Any] = causal_convolution, gated_delta_rule
_KERNELS: tuple[Any, Any] = _convolve_by_kernel, _delta_rule_by_kernel
