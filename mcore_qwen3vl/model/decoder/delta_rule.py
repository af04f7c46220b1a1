"""The two operations of a gated delta net, in plain torch: causal convolution and the delta rule.

They run in any dtype on any device, keep packed samples apart and continue from a state. Half
precision on a GPU uses flash-linear-attention's kernels instead, see
:mod:`mcore_qwen3vl.model.decoder.delta_net`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.inputs import to_device

label_module(__file__, "gated delta nets")

CHUNK = 64
"""Tokens that the delta rule computes by products of matrices, before it passes on the state."""

EPSILON = 1e-6
"""What Hugging Face and flash-linear-attention add to a sum of squares before its root."""


def causal_convolution(
    x: Tensor, weight: Tensor, bounds: tuple[int, ...], earlier: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its own filter over the tokens up to each one, and apply SiLU.

    Source: HF ``causal_conv1d_fn`` of Qwen3.5.

    Args:
        x: (B, S, D).
        weight: (D, K), whose last value is for the token itself.
        bounds: where samples begin, and S: a sample does not see the one before it.
        earlier: (B, K - 1, D) inputs before a single sample; None: zeros.
    """
    taps, length = weight.shape[1], x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs = F.pad(x, (0, 0, taps - 1, 0)) if earlier is None else torch.cat((earlier, x), 1)
    output = x.to(wide) * weight[:, -1].to(wide)
    place = None if len(bounds) == 2 else _places_in_samples(bounds, x.device)
    for back in range(1, taps):
        # The input `back` tokens before each token; `inputs` begins with K - 1 earlier ones.
        shifted = inputs[:, taps - 1 - back :][:, :length].to(wide)
        if place is not None:
            shifted = shifted.where((place >= back)[:, None], 0)
        output = output + shifted * weight[:, taps - 1 - back].to(wide)
    return F.silu(output).to(x.dtype)


@lru_cache(maxsize=16)  # every layer of a micro-batch makes the same call
def _places_in_samples(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each token's number in its sample, from 0 on: (S,) int64."""
    places = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
    return to_device(places, device)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    bounds: tuple[int, ...],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read from a state S after each token has changed it, ``S = a S + b k (v - a S^T k)^T``.

    Here a is the token's decay and b its beta. Queries and keys are normalised first, and queries
    scaled by D ** -0.5; each of their heads serves as many consecutive heads of the values. Source:
    HF ``torch_chunk_gated_delta_rule`` of Qwen3.5; Yang et al., "Gated Delta Networks", 2024,
    section 3.3.

    Args:
        query: (B, S, key heads, D).
        key: (B, S, key heads, D).
        value: (B, S, heads, V).
        log_decay: (B, S, heads), natural logarithms of decays, at most 0.
        beta: (B, S, heads), from 0 to 1.
        bounds: where samples begin, and S: each sample begins with a state of its own.
        state: (B, heads, D, V) state before the first token of each sample; None: zeros.

    Returns:
        (B, S, heads, V) in the dtype of `query`, and the last sample's state in float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    inputs = [x.to(wide).transpose(1, 2) for x in (query, key, value, log_decay, beta)]
    samples = [
        _delta_rule_of_sample([x[:, :, start:stop] for x in inputs], state)
        for start, stop in pairwise(bounds)
        if stop > start
    ]
    output = torch.cat([output for output, _ in samples], 2).transpose(1, 2)
    return output.to(query.dtype), samples[-1][1]


def _delta_rule_of_sample(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run one sample, (B, heads, S, ...), chunk by chunk; return (B, heads, S, V) and the state."""
    query, key, value, log_decay, beta = inputs
    length = query.shape[2]
    size = min(CHUNK, length)
    shared = value.shape[1] // key.shape[1]
    query, key = (_normalise(x).repeat_interleave(shared, dim=1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    padding = -length % size
    chunks = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    q, k, v = (x.unflatten(2, (-1, size)) for x in chunks)  # (B, heads, chunks, size, ...)
    log_decay, b = (F.pad(x, (0, padding)).unflatten(2, (-1, size)) for x in (log_decay, beta))
    since = log_decay.cumsum(-1)  # logarithm of the decay since the chunk began
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    # What each token writes depends on what earlier ones of its chunk wrote: a triangular system.
    # It is solved for the values, and for what they take from the state before the chunk. The
    # solver takes the diagonal as 1, and does not read it.
    system = (k @ k.mT) * between * b[..., None]
    sides = torch.cat((v, k * since.exp()[..., None]), -1) * b[..., None]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.mT) * between
    q = q * since.exp()[..., None]
    k = k * (since[..., -1:] - since).exp()[..., None]
    over_chunk = since[..., -1].exp()[..., None, None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    state = state.to(q.dtype)
    outputs = []
    for n in range(q.shape[2]):
        new = written[:, :, n] - from_state[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + within[:, :, n] @ new)
        state = state * over_chunk[:, :, n] + k[:, :, n].mT @ new
    return torch.cat(outputs, 2)[:, :, :length], state


def _normalise(x: Tensor) -> Tensor:
    """Scale the vectors on the last axis to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
