"""The losses of embeddings over the global batch: all micro-batches of all data-parallel ranks.

The loss of a query depends on every document of the global batch, and these are never in one
forward pass. So the embeddings are first computed without gradients, gathered, and the loss is
differentiated with respect to them; a second pass then takes each micro-batch's part of that
gradient through the model. Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021 (GradCache). With one micro-batch a rank, one pass is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.contrastive import contrastive_losses
from mcore_qwen3vl.objectives.settings import Contrastive
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units
from mcore_qwen3vl.training.step.two_passes import evaluated, two_passes
from mcore_qwen3vl.training.tasks.pooling import pooled, states

EMBED = pooled(states)
"""Computes (N, H) embeddings, not normalised."""


def of_queries(contrastive: Contrastive) -> Objective:
    """Return the objective of embedding training: a mean over the queries of the global batch."""

    def objective(batch: Batch, local: Tensor, embeddings: Tensor) -> Reduced:
        losses, gradients = (
            batch.contrast or contrasts([batch], [embeddings.detach()], contrastive)[0]
        )
        total = (embeddings * gradients).sum()  # its gradient is that of the global batch's loss
        return of_units(total, batch, {contrastive.name: losses})

    return objective


def with_contrasts(
    contrastive: Contrastive, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first compute all embeddings."""
    schedule = original(*args, **kwargs)

    def use(batches: list[Batch], embeddings: list[Tensor]) -> list[Batch]:
        found = contrasts(batches, embeddings, contrastive)
        return [replace(batch, contrast=one) for batch, one in zip(batches, found, strict=True)]

    both = two_passes(schedule, first=_step, use=use, within=evaluated)
    return lambda **given: (schedule if given["num_microbatches"] == 1 else both)(**given)


def contrasts(
    batches: Sequence[Batch], embeddings: Sequence[Tensor], contrastive: Contrastive
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
    own = [batch.groups for batch in batches]
    targets = [batch.targets for batch in batches if batch.targets is not None]
    if contrastive.takes_scores and len(targets) < len(batches):
        raise BadInput("The batch has no scores.")
    groups: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(groups, own, group=parallel_state.get_data_parallel_group_gloo())
    sizes = [sum(map(sum, of_rank)) for of_rank in groups]
    everyone = _gathered(torch.cat(list(embeddings)), sizes).requires_grad_()
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
    return list(
        zip(mine, gradients.split(sizes)[rank].split([sum(one) for one in own]), strict=True)
    )


def _gathered(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows (n, H) of all data-parallel ranks, whose numbers are `sizes`, in order."""
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    whole = rows.new_empty(len(sizes) * len(padded), rows.shape[1])
    dist.all_gather_into_tensor(whole, padded, group=parallel_state.get_data_parallel_group())
    return torch.cat([one[:n] for one, n in zip(whole.chunk(len(sizes)), sizes, strict=True)])


def _step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
    output, _ = EMBED(next(batches), model)
    return output, lambda embeddings, non_loss_data: embeddings
