"""Losses of rerankers and of classifiers.

A reranker's are over the documents of each query, of which the first is the right one:

- ``pointwise``: binary cross entropy of each document by itself.
- ``listwise``: cross entropy of the right document among those of its query. Cao et al., "Learning
  to Rank: From Pairwise Approach to Listwise Approach", 2007, with one right document (ListNet).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.objectives.settings import Ranking


def ranking_losses(
    scores: Tensor, groups: Sequence[int], ranking: Ranking
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each document or query.

    Args:
        scores: (N,) float32, the logit of each document's relevance, a query's after the other's.
        groups: the number of documents of each query, its right one first.

    Returns:
        Losses (documents,) or (queries,), float32, with a gradient for `scores`; and for each 1.0
        if the document is on the right side of 0, or the query's right one has the highest score,
        else 0.0.
    """
    if ranking == "pointwise":
        right = [float(place == 0) for size in groups for place in range(size)]
        labels = to_device(torch.tensor(right), scores.device)
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return losses, ((scores > 0) == (labels > 0)).float()
    rows = torch.nn.utils.rnn.pad_sequence(
        list(scores.split(list(groups))), batch_first=True, padding_value=-torch.inf
    )
    return rows.logsumexp(1) - rows[:, 0], (rows.argmax(1) == 0).float()


def classification_losses(
    logits: Tensor, right: Tensor, *, is_single: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each record, as HF's ``ForSequenceClassificationLoss`` does.

    Args:
        logits: (N, labels) float32.
        right: (N, labels) float32, 1 for labels that are right and 0 for others.
        is_single: whether one label is right, so that they exclude one another: cross entropy.
            Otherwise each label is judged by itself: the mean of their binary cross entropies.

    Returns:
        Losses (N,) float32, with a gradient for `logits`; and for each 1.0 if all its labels are
        predicted right, else 0.0.
    """
    if is_single:
        losses = F.cross_entropy(logits, right, reduction="none")
        return losses, (logits.argmax(1) == right.argmax(1)).float()
    losses = F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
    return losses, ((logits > 0) == (right > 0)).all(1).float()
