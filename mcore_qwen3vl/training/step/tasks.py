"""The objectives of tasks, means over the global batch, and what they read from the last tokens.

Last tokens are read as ``_pooling_last`` of Qwen3-VL-Embedding does, after the final norm.

The loss of an embedded query depends on every document of the global batch, and these are never in
one forward pass. So the embeddings are first computed without gradients, gathered, and the loss is
differentiated with respect to them; a second pass then takes each micro-batch's part of that
gradient through the model. Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021 (GradCache). With one micro-batch a rank, one pass is enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.objectives.losses import (
    classification_losses,
    contrastive_losses,
    ranking_losses,
    reward_losses,
)
from mcore_qwen3vl.objectives.settings import Contrastive, Ranking
from mcore_qwen3vl.training.arguments.tasks import answers_of, contrastive_of, labels_of, ranking_of
from mcore_qwen3vl.training.step.forward import RunBatch, read_by
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units
from mcore_qwen3vl.training.step.two_passes import evaluated, finding, two_passes

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


def _pool(
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
    own = to_device(at >= 0, device)[:, None]
    states = hidden_states[to_device(at.clamp(min=0), device), to_device(rows, device)].float()
    states = torch.where(own, states, 0.0)
    if sharded:
        group = parallel_state.get_tensor_model_parallel_group()
        states = reduce_from_tensor_model_parallel_region(states, group=group)
    group = parallel_state.get_context_parallel_group()
    values = read(states, output_layer, output_weight)
    return reduce_from_tensor_model_parallel_region(values, group=group)


def pooled(read: Read) -> RunBatch:
    """Return what runs a micro-batch through a pipeline chunk and reads its last tokens.

    On the last stage it returns (N, K) values, float32 and equal on all ranks of a TP x CP group.
    """
    return read_by(partial(_pool, read))


EMBED = pooled(lambda states, head, weight: states)
"""Runs a micro-batch, whose values are (N, H) embeddings, not normalised."""
SCORES = pooled(lambda states, head, weight: head(states))
"""Runs a micro-batch, whose values are the scores (N, labels) of a classifier's head."""


def objective_of(args: argparse.Namespace) -> tuple[Objective, RunBatch]:
    """Return the objective of ``--task``, and what runs a micro-batch for it."""
    if args.task == "embedding":
        return of_queries(contrastive_of(args)), EMBED
    if args.task == "reward":
        return of_rewards, SCORES
    if labels := labels_of(args):
        return partial(of_labels, labels), SCORES
    return partial(of_documents, ranking_of(args)), judge(args.hf_model, answers_of(args))


def of_rewards(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
    """Compute the mean loss of reward models over the pairs."""
    if batch.targets is None:
        raise BadInput("The batch has no margins.")
    rewards = values.view(-1, 2)
    losses = reward_losses(rewards, batch.targets)
    gaps = rewards[:, 0] - rewards[:, 1]
    numbers = {
        "reward loss": losses,
        "rewards chosen": rewards[:, 0],
        "rewards rejected": rewards[:, 1],
        "rewards margin": gaps,
        "rewards accuracy": (gaps > 0).float(),
    }
    return of_units(losses.sum(), batch, numbers)


def of_labels(labels: Labels, batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
    """Compute the mean loss of classifiers over the records."""
    if batch.targets is None:
        raise BadInput("The batch has no labels.")
    losses, right = classification_losses(logits, batch.targets, is_single=labels.is_single)
    return of_units(losses.sum(), batch, {"classification loss": losses, "accuracy": right})


def of_documents(ranking: Ranking, batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
    """Compute the mean loss of rerankers over documents (``pointwise``) or queries (``listwise``).

    Its values are the logits of ``yes`` and ``no`` after a query and a document.
    """
    losses, right = ranking_losses(relevance(logits), batch.groups, ranking)
    return of_units(losses.sum(), batch, {"reranker loss": losses, "accuracy": right})


def judge(folder: str | Path, words: tuple[str, str]) -> RunBatch:
    """Return what runs a micro-batch, whose values are the logits (N, 2) of two words.

    It raises BadInput if a word is not a single token.
    """
    tokenizer = load_processor(folder).tokenizer
    tokens = []
    for word in words:
        found = tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(found) != 1:
            raise BadInput(
                f"The answer {word!r} is {len(found)} tokens in this tokenizer; a reranker's "
                "answers are one token each: name two others with --answers."
            )
        tokens += found
    return pooled(lambda states, head, weight: head(states, weight, tokens=tokens)[0])


def relevance(logits: Tensor) -> Tensor:
    """Return each document's logit of relevance (N,), from the logits (N, 2) of the answers.

    The sigmoid of it is the score of Qwen3-VL-Reranker.
    """
    return logits[:, 0] - logits[:, 1]


def of_queries(contrastive: Contrastive) -> Objective:
    """Return the objective of embedding training: a mean over the queries of the global batch."""

    def objective(batch: Batch, local: Tensor, embeddings: Tensor) -> Reduced:
        losses, gradients = (
            batch.contrast or contrasts(contrastive, [batch], [embeddings.detach()])[0]
        )
        total = (embeddings * gradients).sum()  # its gradient is that of the global batch's loss
        return of_units(total, batch, {contrastive.name: losses})

    return objective


def with_contrasts(contrastive: Contrastive, schedule: Callable[..., Any], **given: Any) -> Any:
    """Run Megatron's `schedule` after a pass for all embeddings, if there are several to gather."""
    if given["num_microbatches"] == 1:
        return schedule(**given)
    values = partial(contrasts, contrastive)
    first = finding(EMBED, lambda batch, local, embeddings: embeddings)
    return two_passes("contrast", schedule, first=first, within=evaluated, values=values, **given)


def contrasts(
    contrastive: Contrastive, batches: Sequence[Batch], embeddings: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Differentiate the loss of all DP ranks' micro-batches with respect to their embeddings.

    All data-parallel ranks call this, each with its own micro-batches, and all compute the same
    loss of all queries.

    Args:
        embeddings: (N, H) float32 for each of them, without a gradient.

    Returns:
        For each of `batches`, the losses (queries,) of its queries, and the gradient (N, H) of the
        sum of all ranks' losses.
    """
    own = [() if batch.is_spare else batch.groups for batch in batches]
    targets = [
        batch.targets[: len(of)]
        for batch, of in zip(batches, own, strict=True)
        if batch.targets is not None
    ]
    vectors = [one[: sum(of)] for one, of in zip(embeddings, own, strict=True)]
    if contrastive.takes_scores and len(targets) < len(batches):
        raise BadInput("The batch has no scores.")
    groups: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(groups, own, group=parallel_state.get_data_parallel_group_gloo())
    sizes = [sum(map(sum, of_rank)) for of_rank in groups]
    everyone = _gathered(torch.cat(vectors), sizes).requires_grad_()
    queries = [sum(map(len, of_rank)) for of_rank in groups]
    scores = None
    if contrastive.takes_scores:
        scores = _gathered(torch.cat(targets)[:, None], queries)[:, 0]
    texts = [size for of_rank in groups for one in of_rank for size in one]
    with torch.enable_grad():
        losses = contrastive_losses(everyone, texts, contrastive, scores)
        (gradients,) = torch.autograd.grad(losses.sum(), everyone)
    rank = parallel_state.get_data_parallel_rank()
    mine = losses.detach().split(queries)[rank].split([len(one) for one in own])
    of_own = gradients.split(sizes)[rank].split([sum(one) for one in own])
    return [
        # A spare batch takes part in no loss.
        (torch.zeros(len(batch.groups), device=one.device), torch.zeros_like(one))
        if batch.is_spare
        else (losses, gradient)
        for batch, one, losses, gradient in zip(batches, embeddings, mine, of_own, strict=True)
    ]


def _gathered(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows (n, H) of all data-parallel ranks, whose numbers are `sizes`, in order."""
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    whole = rows.new_empty(len(sizes) * len(padded), rows.shape[1])
    dist.all_gather_into_tensor(whole, padded, group=parallel_state.get_data_parallel_group())
    return torch.cat([one[:n] for one, n in zip(whole.chunk(len(sizes)), sizes, strict=True)])
