"""Stubs of two packages for one rank of a rehearsal, whether or not the packages are installed.

DeepEP
------

It is no DeepEP: nothing is exchanged. It launches as many kernels as ``deep_ep.Buffer`` (1.2.1) and
``deep_ep.HybridEPBuffer`` (branch hybrid-ep) do, waits where they wait, and holds about the memory
that they ask for. It returns tensors of the sizes that random routing gives. The bytes that it
hands to a group are those of its tokens; :mod:`mcore_qwen3vl.rehearsal.step_time` knows how often
they are sent.

flash-linear-attention
----------------------

It computes nothing. In training it launches as many kernels as version 0.6 with its Triton kernels,
the default on NVIDIA's GPUs. It keeps the same tensors for the backward pass, holds the same
temporary ones for as long, and counts the bytes that each kernel reads and writes (each tensor
once) and the FLOPs of its products. The states before all chunks, the largest tensor, are computed
again in the backward pass. A decoder's single step is left out, because no rehearsal decodes.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.delta_rule import CHUNK
from mcore_qwen3vl.rehearsal.holders import COMBINE, DISPATCH
from mcore_qwen3vl.simulated_gpu.integers import host_view
from mcore_qwen3vl.simulated_gpu.rank import launch

label_module(__file__, None)  # what a stub allocates is its caller's

_NODE = 8  # GPUs
_CHANNELS, _CHUNK = 10, 256  # of a buffer: 20 SMs, two for a channel; tokens in each
_FUNCTIONS = (
    *("fused_dispatch", "fused_combine", "set_deepep_num_sms"),
    *("hybrid_ep_dispatch", "hybrid_ep_combine"),
)


def install_deep_ep() -> None:
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
    """In place of DeepEP's ``EventOverlap``, whose ends it does not wait for."""

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
    """In place of ``deep_ep.Buffer``; names, arguments and results are those of DeepEP."""

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
        # DeepEP's order; the second, the tokens for each node, is left out here.
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
        if handle is not None:  # in the backward pass of `combine`, the sizes are known
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
        rows_of = torch.bincount(host_view(indices).flatten() + 1, minlength=experts_per_rank + 1)
        counts = rows_of[1:].tolist()  # the first are of no local expert
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
    """In place of ``deep_ep.HybridEPBuffer``, likewise."""

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


# Whoever looks for the package finds none before `install_linear_attention`. Importing it would
# start CUDA, and here it would be imported with Megatron, in the process that all ranks are forked
# from.
if "fla" not in sys.modules:
    sys.modules["fla"] = None  # type: ignore[assignment]

_WIDEST = 128  # columns of keys that a kernel takes at once


def install_linear_attention() -> None:
    """Let :mod:`mcore_qwen3vl.model.decoder.delta_net` find this stub; it imports it in use."""
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.modules": {},
        "fla.modules.causal_conv1d": {"causal_conv1d": causal_conv1d},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule": None,
        },
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # those who ask whether it is installed look here
        module.__dict__.update(functions)
        sys.modules[name] = module


def causal_conv1d(
    x: Tensor, weight: Tensor, *, activation: str, **packing: Tensor
) -> tuple[Tensor, None]:
    """Take (B, S, D) and (D, K), and return (B, S, D)."""
    output: Tensor = _Convolution.apply(x, weight, _count_chunks(x, **packing))
    return output, None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    **packing: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Take (B, S, key heads, D) twice, (B, S, heads, V) and (B, S, heads) twice."""
    chunks = _count_chunks(q, **packing)
    result: tuple[Tensor, Tensor | None] = _Rule.apply(q, k, v, g, beta, output_final_state, chunks)
    return result


def _count_chunks(
    x: Tensor, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> int:
    """Return the chunks of all sequences; `cu_seqlens` only belongs to the library's signature."""
    return len(x) * -(-x.shape[1] // CHUNK) if chunk_indices is None else len(chunk_indices)


class _Convolution(Function):
    """The convolution of :func:`causal_conv1d`, as an operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        output = torch.empty_like(x)
        launch([x, weight], [output])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        before_silu = torch.empty_like(x)
        launch([x, weight], [before_silu])
        to_x = torch.empty_like(x)
        to_weight = weight.new_empty(ctx.chunks, *weight.shape, dtype=torch.float32)
        launch([x, weight, before_silu, gradient], [to_x, to_weight])
        return to_x, to_weight.sum(0).to(weight), None


class _Rule(Function):
    """The rule of :func:`chunk_gated_delta_rule`, as an operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        keep_state: bool,
        chunks: int,
    ) -> tuple[Tensor, Tensor | None]:
        (query, of_queries), (key, of_keys) = map(_launch_normalisation, (query, key))
        since = torch.empty_like(log_decay, dtype=torch.float32)
        launch([log_decay], [since])
        kernels = _Kernels(query, key, value, since, beta, chunks)
        system = kernels.compute_inverses()
        output, state = kernels.compute_output(system, keep_state)
        ctx.save_for_backward(query, of_queries, key, of_keys, value, since, beta, system)
        ctx.chunks = chunks
        return output, state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        query, of_queries, key, of_keys, value, since, beta, system = ctx.saved_tensors
        kernels = _Kernels(query, key, value, since, beta, ctx.chunks)
        to_query, to_key, *others = kernels.compute_gradients(system, gradient.contiguous())
        to_query = _launch_normalisation_backward(query, of_queries, to_query)
        to_key = _launch_normalisation_backward(key, of_keys, to_key)
        return to_query, to_key, *others, None, None


def _launch_normalisation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normed tensor, and the scale of each row, which the backward pass needs."""
    normed, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch([x], [normed, scale])
    return normed, scale


def _launch_normalisation_backward(normed: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    result = torch.empty_like(normed)
    launch([normed, scale, gradient], [result])
    return result


class _Kernels:
    """The kernels of one call of the rule. A method's temporary tensors live until it returns."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, since: Tensor, beta: Tensor, chunks: int
    ) -> None:
        self.query, self.key, self.value, self.since, self.beta = query, key, value, since, beta
        self.heads, self.width = value.shape[2], key.shape[3]
        self.chunks = chunks
        # FLOPs of a product that takes one multiplication for each token and head.
        self.product = 2 * CHUNK * chunks * self.heads
        self.per_state = self.width * value.shape[3]
        self.per_key, self.per_value = CHUNK * self.width, CHUNK * value.shape[3]

    def empty_for_heads(self, x: Tensor) -> Tensor:
        """Return an empty tensor for keys or queries of all heads, not of key heads alone."""
        return x.new_empty(*x.shape[:2], self.heads, self.width)

    def compute_inverses(self) -> Tensor:
        """Return the inverse of each chunk's triangular system, (B, S, heads, CHUNK)."""
        key = self.key
        system = key.new_zeros(*key.shape[:2], self.heads, CHUNK)
        launch([key, self.since, self.beta], [system], self.product * self.per_key)
        return system

    def compute_written(self, system: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each token takes from the state, and what it writes besides."""
        taken, written = self.empty_for_heads(self.key), torch.empty_like(self.value)
        read = [self.key, self.value, self.beta, system, self.since]
        launch(read, [taken, written], self.product * (self.per_key + self.per_value))
        return taken, written

    def compute_states(
        self, taken: Tensor, written: Tensor, keep_last: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the state before each chunk, the new values, and the last states in float32."""
        shape = self.heads, self.width, self.value.shape[3]
        states = self.key.new_empty(self.chunks, *shape)
        last = None
        if keep_last:
            last = self.key.new_zeros(len(self.key), *shape, dtype=torch.float32)
        new = torch.empty_like(written)
        read = [self.key, taken, written, self.since]
        launch(read, [states, new], 2 * self.product * self.per_state)
        return states, new, last

    def compute_output(self, system: Tensor, keep_last: bool) -> tuple[Tensor, Tensor | None]:
        """Return the rule's output, (B, S, heads, V), and its last states if they are kept."""
        taken, written = self.compute_written(system)
        states, new, last = self.compute_states(taken, written, keep_last)
        output = torch.empty_like(self.value)
        read = [self.query, self.key, new, states, self.since]
        flops = self.product * (self.per_state + self.per_key + self.per_value)
        launch(read, [output], flops)
        return output, last

    def compute_gradients(self, system: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return those of query, key, value, log_decay and beta; queries and keys are normed."""
        query, key, since = self.query, self.key, self.since
        taken, written = self.compute_written(system)
        states, new, _ = self.compute_states(taken, written, False)
        to_new = torch.empty_like(gradient)
        flops = self.product * (self.per_key + self.per_value)
        launch([query, key, since, gradient], [to_new], flops)
        to_states, to_all_new = torch.empty_like(states), torch.empty_like(to_new)
        read = [query, key, taken, since, gradient, to_new]
        launch(read, [to_states, to_all_new], 3 * self.product * self.per_state)
        del to_new  # the library frees it here too, which counts for the peak
        to_query, to_key = self.empty_for_heads(query), self.empty_for_heads(key)
        to_taken = torch.empty_like(taken)
        to_decay = since.new_empty(-(-self.width // _WIDEST), *since.shape)
        read = [query, key, new, since, states, gradient, to_states, to_all_new]
        flops = self.product * (3 * self.per_state + 3 * self.per_key + self.per_value)
        launch(read, [to_query, to_key, to_taken, to_decay], flops)
        to_query, to_key = self._sum_heads(to_query), self._sum_heads(to_key)
        to_decay = to_decay.sum(0)
        key_again, decay_again = self.empty_for_heads(key), torch.empty_like(since)
        to_value, to_beta = torch.empty_like(self.value), torch.empty_like(self.beta)
        read = [key, self.value, self.beta, since, system, to_taken, to_all_new]
        flops = self.product * (5 * self.per_key + 2 * self.per_value + 2 * CHUNK**2)
        launch(read, [key_again, to_value, to_beta, decay_again], flops)
        to_key.add_(self._sum_heads(key_again))
        to_decay.add_(decay_again)
        result = torch.empty_like(to_decay)
        launch([to_decay], [result])
        return to_query, to_key, to_value, result, to_beta

    def _sum_heads(self, x: Tensor) -> Tensor:
        """Add up the heads that share a key head."""
        of_keys = self.key.shape[2]
        return x if of_keys == self.heads else x.unflatten(2, (of_keys, -1)).sum(3)
