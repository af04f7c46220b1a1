"""The ``alltoall`` dispatcher of tokens, without sorts of what is in order and without scatters."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from mcore_qwen3vl.kernels.permutation import Order, fits, order_by_expert, sum_rows
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, "experts and router")


class GatheringDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher for the experts of the torch spec.

    Where EP and ETP are 1, tokens that were permuted are in the order of the experts. Megatron
    divides them by expert and joins them again, with the numbers of tokens on the host. Where our
    kernels run, tokens are permuted by gathers, forward and backward: a token's rows are added in
    float32 and rounded once. Megatron adds them in the tokens' dtype by a scatter.

    An object of Megatron's class becomes one of this. T is the number of tokens on this rank.
    """

    _order: Order | None = None
    """That of the micro-batch in progress, if kernels have found it."""

    @property
    def _is_ordered(self) -> bool:
        """Whether permuted tokens are in the order of this rank's experts."""
        return self.ep_size == 1 and self.tp_size == 1 and not self.drop_and_pad

    @property
    def _has_all(self) -> bool:
        """Whether each token has as many experts as the router chooses, so that n is known."""
        config = self.config
        return (
            config.moe_expert_capacity_factor is None
            and not config.moe_router_padding_for_quantization
            # Routes that are replayed name one expert several times for tokens that are padding.
            and not config.moe_enable_routing_replay
        )

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return the number of tokens of each local expert, and set what exchanges need."""
        if not (self._is_ordered and self._has_all):
            return super().preprocess(routing_map)
        self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        if self._order is not None:
            return self._order.counts
        return routing_map.sum(0)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Permute tokens and weights: (s_local, B, H) and (T, E) to (n, H) and (n,)."""
        self._order = None
        takes = fits(hidden_states, routing_map.shape[1]) and not self.config.moe_permute_fusion
        if not takes or self.drop_and_pad or self.shared_experts is not None or not self._has_all:
            permuted: tuple[Tensor, Tensor]
            permuted = super().dispatch_preprocess(hidden_states, routing_map, probs)
            return permuted
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        most = self.config.moe_router_topk
        self._order = order_by_expert(routing_map, most, len(tokens) * most)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.preprocess(routing_map)
        )
        of_rows = probs.reshape(-1).index_select(0, self._order.entries)
        return _Gather.apply(tokens, self._order.tokens, self._order.rows), of_rows

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens in the order of local experts, their number for each, and weights."""
        if not self._is_ordered:
            dispatched: tuple[Tensor, Tensor, Tensor]
            dispatched = super().dispatch_postprocess(global_input_tokens, global_probs)
            return dispatched
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' outputs (n, H) in the order in which they are exchanged."""
        if self._is_ordered:
            return hidden_states
        combined: Tensor = super().combine_preprocess(hidden_states)
        return combined

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Add up the outputs of each token: (n, H) to (s_local, B, H)."""
        if self._order is None:
            combined: Tensor = super().combine_postprocess(permutated_local_input_tokens)
            return combined
        order, self._order = self._order, None
        sums: Tensor = _Sum.apply(permutated_local_input_tokens, order.tokens, order.rows)
        return sums.view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Any:
        """Copy what the host needs; it needs nothing where no other rank takes part."""
        if self._is_ordered and self._has_all:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


class _Gather(torch.autograd.Function):
    """Gathers the tokens (T, H) of rows (n, H)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return values.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(gradient, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    """Adds up the rows (n, H) of tokens (T, H)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return sum_rows(values, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None
