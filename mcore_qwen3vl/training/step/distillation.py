"""The divergence from a teacher, on ranks that each hold a part of every sequence.

A teacher in memory takes one more forward pass in each step, which keeps its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.scores import Top
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.head.module import Head
from mcore_qwen3vl.model.head.top_k import likeliest, log_probs_of
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.objectives.losses import divergences
from mcore_qwen3vl.objectives.settings import Distillation
from mcore_qwen3vl.training.arguments.losses import DISTILL
from mcore_qwen3vl.training.step.forward import RunBatch, read_by
from mcore_qwen3vl.training.step.losses import Objective, Reduced, cross_entropy, of_tokens
from mcore_qwen3vl.training.step.two_passes import finding


def compared(settings: Distillation) -> RunBatch:
    """Return what runs a micro-batch through a pipeline chunk and compares it with the teacher.

    On the last stage it returns (2, B, s) float32: divergences, and cross entropies.
    """
    return read_by(partial(_compare, settings))


def of_divergences(settings: Distillation) -> Objective:
    """Return the objective of distillation: a mean over the trained tokens of the global batch."""
    mean = of_tokens(cross_entropy)

    def objective(batch: Batch, local: Tensor, found: Tensor) -> Reduced:
        divergence, of_labels = found
        # The squared temperature makes up for gradients that are as much smaller.
        scaled = settings.temperature**2 * divergence
        reduced = mean(batch, local, settings.alpha * of_labels + (1 - settings.alpha) * scaled)
        weights = batch.loss_weights.index_select(1, to_device(local, found.device))
        parts = {"divergence": divergence, "lm loss": of_labels}
        sums = {name: cross_entropy(one.detach(), weights)[0] for name, one in parts.items()}
        return reduced._replace(sums={f"{DISTILL} loss": reduced.total.detach(), **sums})

    return objective


def _compare(
    settings: Distillation,
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    local = chunk.local_tokens(batch.input_ids.shape[1], packed_seq_params)
    ids, teacher = _teacher_at(batch, to_device(local, labels.device))
    student, of_labels = output_layer(
        hidden_states,
        output_weight,
        reduce=partial(log_probs_of, ids=ids, targets=labels, temperature=settings.temperature),
    )
    return torch.stack([divergences(student, teacher, settings), -of_labels])


def _teacher_at(batch: Batch, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher's ids (B, s, k) and log-probabilities (B, s, k + 1) at positions `own`."""
    if batch.teacher is None:
        raise BadInput("The batch has no tokens of a teacher.")
    if batch.teacher.ids.ndim == 3:  # a live teacher's, at these positions
        return batch.teacher.ids, batch.teacher.log_probs
    trained = batch.loss_weights > 0
    number = trained.flatten().cumsum(0).view_as(trained) - 1
    row = number.where(trained, len(batch.teacher.ids) - 1).index_select(1, own)
    return batch.teacher.ids[row], batch.teacher.log_probs[row]


def teacher_step(k: int, temperature: float) -> Callable[..., Any]:
    """Return the forward step of a first pass, which finds the teacher's `k` likeliest tokens."""
    run = read_by(partial(_likeliest, k=k, temperature=temperature))
    return finding(run, lambda batch, local, found: Top(found[..., :k].int(), found[..., k:]))


def _likeliest(
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    k: int,
    temperature: float,
    **_: Any,
) -> Tensor:
    """Compute (B, s, 2 k + 1) float32: k ids, their log-probabilities and that of the rest."""
    ids, log_probs = output_layer(
        hidden_states, output_weight, reduce=partial(likeliest, k=k, temperature=temperature)
    )
    return torch.cat([ids.float(), log_probs], -1)  # Megatron passes one tensor on
