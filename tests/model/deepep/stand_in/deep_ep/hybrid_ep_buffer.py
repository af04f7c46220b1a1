"""DeepEP's ``HybridEPBuffer``: tokens arrive permuted, each once for every expert that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.exchange import Route, check_rows, check_weights

CHUNK = 64
"""Tokens that a kernel works on at a time."""


@dataclass(frozen=True)
class Handle:
    """What later calls along the same routes need to know. P permuted rows come from R tokens."""

    route: Route
    held: int  # experts of this rank
    experts: Tensor  # (P,) the expert of this rank that takes a permuted row, in order
    rows: Tensor  # (P,) the received token that it is
    counts: Tensor  # (held,) int64 on the host: rows of each expert, padding not included

    def padded(self, multiple: int | None) -> tuple[Tensor, Tensor]:
        """Return the place (P,) of each row, and the rows of each expert with its padding."""
        sizes = self.counts.clone()
        if multiple:
            sizes = (sizes + multiple - 1) // multiple * multiple
        starts, own = sizes.cumsum(0) - sizes, self.counts.cumsum(0) - self.counts
        return torch.arange(len(self.rows)) + (starts - own)[self.experts], sizes


class HybridEPBuffer:
    """The buffers of one group; see DeepEP's class of that name for arguments and results."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        **sizes: int,
    ) -> None:
        assert not use_fp8
        self.group, self.hidden_dim = group, hidden_dim

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, Handle]:
        check_rows(hidden)
        assert hidden.shape[1] == self.hidden_dim
        assert scaling_factor is None
        assert not non_blocking, "the reference counts on the host"
        if handle is None:
            assert routing_map is not None
            handle = self._agree(routing_map, num_of_experts_per_rank, len(hidden))
        place, sizes = handle.padded(pad_multiple)
        total = int(sizes.sum())
        assert num_permuted_tokens is None or int(num_permuted_tokens) == total
        permuted = hidden.new_zeros(total, self.hidden_dim)
        permuted[place] = handle.route.send(hidden)[handle.rows]
        weights = None
        if probs is not None:
            check_weights(probs)
            here = dist.get_rank(self.group) * handle.held
            received = handle.route.send(probs)[:, here : here + handle.held]
            weights = probs.new_zeros(total)
            weights[place] = received[handle.rows, handle.experts]
        return permuted, weights, None, sizes, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        check_rows(hidden)
        place, _ = handle.padded(pad_multiple)
        rows = torch.zeros(sum(handle.route.received), self.hidden_dim)
        rows.index_add_(0, handle.rows, hidden[place].float())
        combined, weights = handle.route.send_back(rows).to(hidden.dtype), None
        if probs is not None:
            check_weights(probs)
            here = dist.get_rank(self.group) * handle.held
            spread = probs.new_zeros(len(rows), self.group.size() * handle.held)
            spread[handle.rows, here + handle.experts] = probs[place]
            weights = handle.route.send_back(spread)
        return combined, weights

    def _agree(self, routing_map: Tensor, held: int | None, tokens: int) -> Handle:
        assert held is not None
        assert routing_map.dtype == torch.bool
        assert routing_map.is_contiguous()
        assert routing_map.shape == (tokens, held * self.group.size())
        assert tokens % CHUNK * self.group.size() * 4 % 16 == 0, f"{tokens} tokens: not aligned"
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.group.size())]
        dist.all_gather(numbers, torch.tensor([tokens]), group=self.group)
        assert len({int(n) for n in numbers}) == 1, f"ranks have different tokens: {numbers}"
        route = Route.of(routing_map.unflatten(1, (-1, held)).any(-1), self.group)
        here = dist.get_rank(self.group) * held
        received = route.send(routing_map.byte())[:, here : here + held].bool()
        experts, rows = received.T.nonzero(as_tuple=True)
        return Handle(route, held, experts, rows, received.sum(0))
