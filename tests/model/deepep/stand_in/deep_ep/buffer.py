"""DeepEP's ``Buffer``, its normal mode: tokens arrive once a rank, and are not permuted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_ep.exchange import Route, check_rows, check_weights
from deep_ep.utils import EventOverlap, check_stream

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""The sizes of groups for which there is a configuration."""


@dataclass(frozen=True)
class Config:
    """A configuration, which tells how much memory a buffer needs."""

    ranks: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks == self.ranks
        return hidden_bytes * num_ranks * 256

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class Handle:
    """What a later combine, or a dispatch along the same routes, needs to know."""

    route: Route


class Buffer:
    """The buffers of one group; see DeepEP's class of that name for arguments and results."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        event = check_stream(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        chosen = chosen[:, :-1]
        in_rank = chosen.unflatten(1, (self.group_size, -1)).any(-1)
        per_rank, per_expert = in_rank.sum(0).int(), chosen.sum(0).int()
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        event = check_stream(previous_event, async_finish, allocate_on_comm_stream)
        check_rows(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return handle.route.send(x), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        check_weights(topk_weights)
        assert len(x) == len(topk_idx) == len(topk_weights) == len(is_token_in_rank)
        route = Route.of(is_token_in_rank, self.group)
        assert route.to == num_tokens_per_rank.tolist()
        held = len(num_tokens_per_expert) // self.group_size
        indices = route.send(topk_idx) - self.rank * held
        absent = (indices < 0) | (indices >= held)
        indices = indices.masked_fill(absent, -1)
        weights = route.send(topk_weights).masked_fill(absent, 0)
        counts = torch.bincount(indices[~absent], minlength=held).tolist()
        return route.send(x), indices, weights, counts, Handle(route), event

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        event = check_stream(previous_event, async_finish, allocate_on_comm_stream)
        check_rows(x)
        weights = None
        if topk_weights is not None:
            check_weights(topk_weights)
            weights = handle.route.send_back(topk_weights)
        return handle.route.send_back(x), weights, event
