"""Embeddings: the hidden states of the last tokens, on ranks that hold a part of every sequence.

Source: ``_pooling_last`` of Qwen3-VL-Embedding, which takes the state after the final norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.training.step.forward import forward


def embed(batch: Batch, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Run one micro-batch through one pipeline chunk of a headless model.

    Returns:
        On the last stage (N, H) embeddings, not normalised, equal on all ranks of a TP x CP group;
        before it the chunk's output. And the (s,) int64 positions of this rank.
    """
    chunk = get_attr_wrapped_model(model, "local_tokens", return_model_obj=True)
    return forward(batch, model, output_processor=partial(_pool, batch, chunk))


def last_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the samples' last tokens, (N,) int64 each, on the host."""
    lengths = torch.tensor(batch.lengths)
    if batch.cu_seqlens is None:
        return torch.arange(len(lengths)), lengths - 1
    starts = batch.cu_seqlens[: len(lengths)].long()
    return torch.zeros_like(lengths), starts + lengths - 1


def _pool(
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    """Take the last tokens' rows of this rank's hidden states (s, B, H), and add up all ranks'.

    Each token is on one rank, the others add zeros. The sum passes each rank the gradient of its
    own tokens.
    """
    sharded = chunk.config.sequence_parallel
    length = batch.input_ids.shape[1]
    local = chunk.local_tokens(length, packed_seq_params, sequence_parallel=sharded)
    places = torch.full((length,), -1)
    places[local] = torch.arange(len(local))
    rows, columns = last_tokens(batch)
    at = places[columns]
    device = hidden_states.device
    own = to_device(at >= 0, device)[:, None]
    states = hidden_states[to_device(at.clamp(min=0), device), to_device(rows, device)].float()
    group = (
        parallel_state.get_tensor_and_context_parallel_group()
        if sharded
        else parallel_state.get_context_parallel_group()
    )
    return reduce_from_tensor_model_parallel_region(torch.where(own, states, 0.0), group=group)
