"""The router of both layer specs: Megatron's, with losses and capacities that no layout changes."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, "experts and router")


class BalancedRouter(TopKRouter):
    """Megatron's router, whose losses weigh each token alike on whatever rank it is.

    Megatron weighs a rank's part of a loss by the rank's own valid tokens. That is right only
    where padding is the same on all ranks of a TP x CP group. It divides ``global_aux_loss`` by the
    tokens of all data-parallel ranks, and the gradients then by the number of these ranks again.
    Source: Fedus et al., "Switch Transformers", 2021; of ``global_aux_loss`` Qiu et al., "Demons in
    the Detail", 2025.

    With a capacity factor an expert takes no more than a number of a micro-batch's tokens. Megatron
    counts padding among them, and each rank of a TP x CP group drops for itself. T is the number of
    tokens on this rank, and E of experts.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._capacity_factor = config.moe_expert_capacity_factor
        if self._capacity_factor is not None:
            self.config = copy(config)
            self.config.moe_expert_capacity_factor = None  # Megatron's router drops nothing itself

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the counts of a step in float32 too: in 16 bits they lose digits, or overflow."""
        super()._maintain_float32_expert_bias()
        if self.global_tokens_per_expert is not None:
            self.global_tokens_per_expert.data = self.global_tokens_per_expert.data.float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts, and drop what exceeds their capacity.

        Args:
            logits: (s_local, B, E).
            padding_mask: (s_local, B) bool, true for padding.

        Returns:
            Weights (T, E) of the experts, and whether an expert takes a token, (T, E) bool.
        """
        probs, routing_map = super().routing(logits, padding_mask)
        # A validation computes the model as it is exported, where every expert takes all.
        if self._capacity_factor is None or not self.training:
            return probs, routing_map
        taken = self._within_capacity(probs.detach(), routing_map, padding_mask)
        return probs * taken, taken

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Return the input with the noise of training; Megatron adds it in a validation too."""
        return super().apply_input_jitter(input) if self.training else input

    def _within_capacity(
        self, probs: Tensor, routing_map: Tensor, padding_mask: Tensor | None
    ) -> Tensor:
        """Return which choices (T, E) an expert has room for, without a host sync.

        The room is for a share of the tokens of the TP x CP group that are no padding. Each expert
        takes those with the largest weights, or the first.
        """
        assert self._capacity_factor is not None
        chosen = routing_map
        if padding_mask is not None:
            chosen = chosen & ~padding_mask.reshape(-1, 1)
        ranking = probs
        if self.config.moe_token_drop_policy == "position":
            ranking = torch.arange(len(probs), 0, -1, device=probs.device)[:, None].to(probs.dtype)
        mine = ranking.where(chosen, -1.0)  # (T, E)
        every, group = mine, self.tp_cp_group
        if group.size() > 1:
            every = mine.new_empty(group.size() * len(mine), mine.shape[1])
            dist.all_gather_into_tensor(every, mine.contiguous(), group=group)
        order = every.argsort(dim=0, descending=True, stable=True)
        numbers = torch.arange(len(every), device=every.device)[:, None].expand_as(order)
        places = torch.empty_like(order).scatter_(0, order, numbers)
        tokens = (every >= 0).any(1).sum().double()
        capacity = (tokens * self.topk / self.num_experts * self._capacity_factor).ceil()
        first = group.rank() * len(mine)
        return chosen & (places[first : first + len(mine)] < capacity)

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Add the loss of a micro-batch to the gradient of `probs`; see :meth:`_balance`."""
        return self._balance("aux_loss", probs, scores_for_aux_loss, routing_map, self.tp_cp_group)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Add the losses of the rows of a micro-batch, each weighted by its tokens."""
        return self._balance(
            "seq_aux_loss", probs, scores_for_aux_loss, routing_map, self.tp_cp_group, rows=bsz
        )

    def _apply_global_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Add the loss of all data-parallel ranks, and of their micro-batches of this step so far.

        Their choices count, while the probabilities are those of this micro-batch.
        """
        return self._balance(
            "global_aux_loss", probs, scores_for_aux_loss, routing_map, self.tp_dp_cp_group
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits (T, E), whose backward pass also adds the gradient of the z-loss.

        It is the mean over the tokens of the ranks of TP x CP, weighted by their number in a run.
        Megatron takes the mean over ranks of each rank's mean: in its log, and elsewhere than in a
        run in the gradient too. Source: Zoph et al., "ST-MoE", 2022.
        """
        coeff = self.config.moe_z_loss_coeff
        if not coeff:
            return logits  # Megatron would divide 0 by 0 for its log
        if padding_mask is None:  # all ranks have as many tokens
            return super().apply_z_loss(logits, padding_mask)
        if not (self.training and torch.is_grad_enabled()):
            return logits
        valid = ~padding_mask  # (T,)
        tokens = valid.sum()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(tokens, group=self.tp_cp_group)
        mean = (logits.logsumexp(-1).square() * valid).sum() / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(
            logits,
            coeff,
            coeff * mean,
            "z_loss",
            self.tp_cp_group,
            valid_token_count=tokens / self.tp_cp_group.size(),  # which Megatron multiplies it by
        )

    def _balance(
        self,
        kind: str,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        group: dist.ProcessGroup,
        rows: int = 1,
    ) -> Tensor:
        """Return `probs`, whose backward pass also adds the gradient of a balancing loss.

        The loss is the mean over the tokens of `group`. In a run it is weighted by their number,
        since the run divides gradients by its trained tokens.

        Args:
            kind: a value of ``--moe-router-load-balancing-type``.
            probs: (T, E) weights of the experts.
            scores: (T, E) softmax of the logits, 0 at padding.
            routing_map: (T, E) whether an expert is chosen, false at padding.
            group: the ranks whose tokens are balanced together.
            rows: the sequences that are balanced each by itself; tokens go through them in turn.
        """
        coeff = self.get_aux_loss_coeff(kind)
        if coeff == 0:
            return probs
        experts = scores.shape[-1]
        chosen = routing_map.view(-1, rows, experts).sum(0)  # (rows, E) int64
        if group.size() > 1:
            dist.all_reduce(chosen, group=group)
        tokens = chosen.sum() / self.topk
        if kind == "global_aux_loss":
            self.global_tokens_per_expert += chosen[0]
            chosen = self.global_tokens_per_expert[None]
        shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)  # (rows, E)
        mean = (shares * scores.view(-1, rows, experts).sum(0)).sum() / tokens.clamp(min=1)
        # The gradients are divided by DP, or by the tokens of all its ranks.
        copies = group.size() / self.tp_cp_group.size()
        return self.attach_and_log_load_balancing_loss(
            probs,
            coeff * copies,
            coeff * copies * experts * mean,
            _LOGGED[kind],
            group,
            needs_dp_avg=copies == 1,
            valid_token_count=tokens / group.size(),  # Megatron multiplies it by TP x CP
        )


_LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""The loss in Megatron's logs, by the value of ``--moe-router-load-balancing-type``."""
