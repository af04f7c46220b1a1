"""A stub of DeepEP for one rank of a rehearsal, whether or not the package is installed.

It is no DeepEP: nothing is exchanged. It launches as many kernels as ``deep_ep.Buffer`` (1.2.1) and
``deep_ep.HybridEPBuffer`` (branch hybrid-ep) do, waits where they wait, holds about the memory that
they ask for, and returns tensors of the sizes that random routing gives. The bytes that it hands to
a group are those of its tokens; :mod:`mcore_qwen3vl.rehearsal.step_time` knows how often they are
sent.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.pretended.flops import launch
from mcore_qwen3vl.pretended.integers import host_view
from mcore_qwen3vl.rehearsal.rank.holders import COMBINE, DISPATCH

_NODE = 8  # GPUs
_CHANNELS, _CHUNK = 10, 256  # of a buffer: 20 SMs, two for a channel; tokens in each
_FUNCTIONS = (
    *("fused_dispatch", "fused_combine", "set_deepep_num_sms"),
    *("hybrid_ep_dispatch", "hybrid_ep_combine"),
)


def install() -> None:
    """Let Megatron's flex dispatcher find this stub; it looks for the package at import."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.__dict__.update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer)
    utils.__dict__.update(EventHandle=object, EventOverlap=_Event)
    moe = "megatron.core.transformer.moe"
    dispatcher = importlib.import_module(f"{moe}.token_dispatcher")
    with mock.patch.dict(sys.modules, {"deep_ep": package, "deep_ep.utils": utils}):
        reloaded = importlib.reload(sys.modules[f"{moe}.fused_a2a"])
    for name in _FUNCTIONS:
        setattr(dispatcher, name, getattr(reloaded, name))


class _Event:
    def __init__(self, event: Any = None) -> None: ...

    def current_stream_wait(self) -> None: ...


class _Sizes(NamedTuple):
    """Tokens of this rank, tokens received (each once), and rows for the experts of this rank."""

    tokens: int
    received: int
    rows: int

    @classmethod
    def estimate(cls, choices: int, tokens: int, top: int, group: Any) -> _Sizes:
        """Assume that all ranks route as this one, which has `choices` for its own experts."""
        missed = (1 - choices / max(tokens * top, 1)) ** top  # share of tokens with none
        received = min(round(tokens * group.size() * (1 - missed)), choices * group.size())
        return cls(tokens, received, choices * group.size())


class Buffer:
    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.memory = torch.empty(num_nvl_bytes + num_rdma_bytes, dtype=torch.int8, device="cuda")

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        def room_for(peers: int) -> Any:
            return lambda hidden_bytes, _: _CHANNELS * peers * _CHUNK * hidden_bytes

        return SimpleNamespace(
            get_nvl_buffer_size_hint=room_for(min(ranks, _NODE)),
            get_rdma_buffer_size_hint=room_for(ranks // _NODE if ranks > _NODE else 0),
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> Any:
        ranks = self.group.size()
        counts = torch.empty(ranks + num_experts, dtype=torch.int32, device="cuda")
        in_rank = torch.empty(len(topk_idx), ranks, dtype=torch.bool, device="cuda")
        launch([topk_idx], [counts, in_rank])
        return counts[:ranks], None, counts[ranks:], in_rank, _Event()

    def dispatch(
        self,
        x: Tensor,
        handle: _Sizes | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> Any:
        launch()  # it tells the others how many tokens come
        if handle is not None:
            self.group.count(DISPATCH, [x])
            launch()
            return x.new_empty(handle.received, x.shape[1]), None, None, None, None, _Event()
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_expert is not None
        experts_per_rank = len(num_tokens_per_expert) // self.group.size()
        first = self.group.rank() * experts_per_rank
        chosen, top = host_view(topk_idx), topk_idx.shape[1]
        received = int(((chosen >= first) & (chosen < first + experts_per_rank)).sum())
        sizes = _Sizes.estimate(received, len(x), top, self.group)
        torch.cuda.current_stream().synchronize()  # it waits for the counts in a loop
        self.group.count(DISPATCH, [x, topk_idx, topk_weights])
        indices = topk_idx.new_empty(sizes.received, top)
        choice, row = torch.arange(top), torch.arange(sizes.received)[:, None]
        local = (row + choice) % experts_per_rank
        host_view(indices).copy_(local.where(row + choice * sizes.received < sizes.rows, -1))
        launch()
        counts = torch.bincount(host_view(indices).flatten() + 1, minlength=experts_per_rank + 1)[
            1:
        ].tolist()
        weights = topk_weights.new_empty(sizes.received, top)
        return x.new_empty(sizes.received, x.shape[1]), indices, weights, counts, sizes, _Event()

    def combine(
        self, x: Tensor, handle: _Sizes, topk_weights: Tensor | None = None, **_: Any
    ) -> Any:
        combined, weights = x.new_empty(handle.tokens, x.shape[1]), None
        if topk_weights is not None:
            weights = topk_weights.new_empty(handle.tokens, topk_weights.shape[1])
        self.group.count(COMBINE, [combined, weights])
        for _kernels in range(2):
            launch()
        return combined, weights, _Event()


class HybridEPBuffer:
    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        **_: Any,
    ) -> None:
        self.group, self.experts = group, num_local_experts * group.size()
        row = 2 * hidden_dim + 4 * num_local_experts * min(group.size(), _NODE)
        size = 2 * max_num_of_tokens_per_rank * group.size() * row  # to dispatch and to combine
        self.memory = torch.empty(size, dtype=torch.int8, device="cuda")

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int = 0,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: _Sizes | None = None,
        **_: Any,
    ) -> Any:
        ranks, experts_per_rank, counts = self.group.size(), num_of_experts_per_rank, None
        if handle is None:
            assert routing_map is not None
            everywhere = routing_map.new_empty(ranks * len(routing_map), routing_map.shape[1])
            dist.all_gather_into_tensor(everywhere, routing_map, group=self.group)
            launch([everywhere])
            launch()  # it pads the counts
            torch.cuda.current_stream().synchronize()
            chosen, first = host_view(routing_map), self.group.rank() * experts_per_rank
            received = chosen[:, first : first + experts_per_rank].sum(0)
            top = int(chosen.sum()) // max(len(chosen), 1)
            handle = _Sizes.estimate(int(received.sum()), len(hidden), top, self.group)
            counts = received * ranks
        self.group.count(DISPATCH, [hidden, probs])
        for _kernels in range(1 if ranks <= _NODE else 3):  # over the network, two copies
            launch()
        permuted = hidden.new_empty(handle.rows, hidden.shape[1])
        launch([permuted[: handle.received]], [permuted])
        weights = None if probs is None else probs.new_empty(handle.rows)
        return permuted, weights, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: _Sizes, probs: Tensor | None = None, **_: Any
    ) -> Any:
        launch([hidden], [hidden[: handle.received]])
        combined = hidden.new_empty(handle.tokens, hidden.shape[1])
        weights = None if probs is None else probs.new_empty(handle.tokens, self.experts)
        self.group.count(COMBINE, [combined, weights])
        launch()
        return combined, weights
