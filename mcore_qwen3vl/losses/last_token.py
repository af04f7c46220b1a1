"""Values at the last token of each sample, which the losses of tasks read.

They are read as ``_pooling_last`` of Qwen3-VL-Embedding does, after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.forward import RunBatch, forward
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

Read = Callable[[Tensor, Any, Tensor | None], Tensor]
"""``(states, head, weight) -> values``.

Args:
    states: (N, H) float32 hidden states of the last tokens on this CP rank, zeros for the others.
        All TP ranks have them.
    head: the chunk's output layer.
    weight: (V / tp, H) weight of a tied head.

Returns:
    (N, K) float32, equal on all TP ranks, and zero where the states are.
"""


def _last_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the samples' last tokens, (N,) int64 each, on the host."""
    lengths = torch.tensor(batch.lengths)
    if batch.cu_seqlens is None:
        return torch.arange(len(lengths)), lengths - 1
    starts = batch.cu_seqlens[: len(lengths)].long()
    return torch.zeros_like(lengths), starts + lengths - 1


def _read_last_tokens(
    read: Read,
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    """Read the last tokens among this rank's hidden states (s, B, H), and add up all CP ranks'.

    Each token is on one rank. A sum passes each rank the gradient of its own tokens. The head comes
    before the sum over CP, so that its gradient on a CP rank is that of the rank's own tokens, as
    for all other parameters.
    """
    sharded = chunk.config.sequence_parallel
    length = batch.input_ids.shape[1]
    local = chunk.local_tokens(length, packed_seq_params, sequence_parallel=sharded)
    places = torch.full((length,), -1)
    places[local] = torch.arange(len(local))
    rows, columns = _last_tokens(batch)
    at = places[columns]
    device = hidden_states.device
    is_here = to_device(at >= 0, device)[:, None]  # -1: another rank has the token
    states = hidden_states[to_device(at.clamp(min=0), device), to_device(rows, device)].float()
    states = torch.where(is_here, states, 0.0)
    if sharded:
        group = parallel_state.get_tensor_model_parallel_group()
        states = reduce_from_tensor_model_parallel_region(states, group=group)
    group = parallel_state.get_context_parallel_group()
    values = read(states, output_layer, output_weight)
    return reduce_from_tensor_model_parallel_region(values, group=group)


def last_token_runner(read: Read) -> RunBatch:
    """Return what runs a micro-batch through a pipeline chunk and reads its last tokens.

    On the last stage it returns (N, K) values, float32 and equal on all ranks of a TP x CP group.
    """
    return partial(forward, processor=partial(_read_last_tokens, read))


SCORES = last_token_runner(lambda states, head, weight: head(states))
"""Runs a micro-batch, whose values are the scores (N, labels) of a classifier's head."""
STATES = last_token_runner(lambda states, head, weight: states)
"""Runs a micro-batch, whose values are the states (N, H) themselves: embeddings."""
