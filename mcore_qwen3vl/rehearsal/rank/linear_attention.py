"""A stub of flash-linear-attention for one rank of a rehearsal, whether or not it is installed.

It computes nothing. In training it launches as many kernels as version 0.6 with its Triton kernels,
the default on NVIDIA's GPUs. It keeps the same tensors for the backward pass, holds the same
temporary ones for as long, and counts the bytes that each kernel reads and writes (each tensor
once) and the FLOPs of its products. The states before all chunks, the largest tensor, are computed
again in the backward pass. A decoder's single step is left out, because no rehearsal decodes.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mcore_qwen3vl.model.decoder.delta_rule import CHUNK
from mcore_qwen3vl.pretended.flops import launch

# Whoever looks for the package finds none before `install`. Importing it would start CUDA, and here
# it would be imported with Megatron, in the process that all ranks are forked from.
if "fla" not in sys.modules:
    sys.modules["fla"] = None  # type: ignore[assignment]

_WIDEST = 128  # columns of keys that a kernel takes at once


def install() -> None:
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
    return len(x) * -(-x.shape[1] // CHUNK) if chunk_indices is None else len(chunk_indices)


class _Convolution(Function):
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
        (query, of_queries), (key, of_keys) = map(_normalise, (query, key))
        since = torch.empty_like(log_decay, dtype=torch.float32)
        launch([log_decay], [since])
        kernels = _Kernels(query, key, value, since, beta, chunks)
        system = kernels.solve()
        output, state = kernels.output(system, keep_state)
        ctx.save_for_backward(query, of_queries, key, of_keys, value, since, beta, system)
        ctx.chunks = chunks
        return output, state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        query, of_queries, key, of_keys, value, since, beta, system = ctx.saved_tensors
        kernels = _Kernels(query, key, value, since, beta, ctx.chunks)
        to_query, to_key, *others = kernels.gradients(system, gradient.contiguous())
        to_query = _normalise_backward(query, of_queries, to_query)
        to_key = _normalise_backward(key, of_keys, to_key)
        return to_query, to_key, *others, None, None


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    normed, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch([x], [normed, scale])
    return normed, scale


def _normalise_backward(normed: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
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

    def of_heads(self, x: Tensor) -> Tensor:
        """Return an empty tensor for keys or queries of all heads, not of key heads alone."""
        return x.new_empty(*x.shape[:2], self.heads, self.width)

    def solve(self) -> Tensor:
        """Return the inverse of each chunk's triangular system, (B, S, heads, CHUNK)."""
        key = self.key
        system = key.new_zeros(*key.shape[:2], self.heads, CHUNK)
        launch([key, self.since, self.beta], [system], self.product * self.per_key)
        return system

    def written(self, system: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each token takes from the state, and what it writes besides."""
        taken, written = self.of_heads(self.key), torch.empty_like(self.value)
        read = [self.key, self.value, self.beta, system, self.since]
        launch(read, [taken, written], self.product * (self.per_key + self.per_value))
        return taken, written

    def states(
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

    def output(self, system: Tensor, keep_last: bool) -> tuple[Tensor, Tensor | None]:
        """Return the rule's output, (B, S, heads, V), and its last states if they are kept."""
        taken, written = self.written(system)
        states, new, last = self.states(taken, written, keep_last)
        output = torch.empty_like(self.value)
        read = [self.query, self.key, new, states, self.since]
        flops = self.product * (self.per_state + self.per_key + self.per_value)
        launch(read, [output], flops)
        return output, last

    def gradients(self, system: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return those of query, key, value, log_decay and beta; queries and keys are normed."""
        query, key, since = self.query, self.key, self.since
        taken, written = self.written(system)
        states, new, _ = self.states(taken, written, False)
        to_new = torch.empty_like(gradient)
        flops = self.product * (self.per_key + self.per_value)
        launch([query, key, since, gradient], [to_new], flops)
        to_states, to_all_new = torch.empty_like(states), torch.empty_like(to_new)
        read = [query, key, taken, since, gradient, to_new]
        launch(read, [to_states, to_all_new], 3 * self.product * self.per_state)
        del to_new
        to_query, to_key = self.of_heads(query), self.of_heads(key)
        to_taken = torch.empty_like(taken)
        to_decay = since.new_empty(-(-self.width // _WIDEST), *since.shape)
        read = [query, key, new, since, states, gradient, to_states, to_all_new]
        flops = self.product * (3 * self.per_state + 3 * self.per_key + self.per_value)
        launch(read, [to_query, to_key, to_taken, to_decay], flops)
        to_query, to_key = self._sum_heads(to_query), self._sum_heads(to_key)
        to_decay = to_decay.sum(0)
        key_again, decay_again = self.of_heads(key), torch.empty_like(since)
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
