"""The losses of embedding models: InfoNCE with in-batch and hard negatives, and two of pairs.

``infonce``: van den Oord et al., "Representation Learning with Contrastive Predictive Coding",
2018, as sentence-transformers' ``MultipleNegativesRankingLoss`` computes it, whose scale is
1 / temperature. With the query q, its positive p and the documents d of the batch, which are all
positives and all hard negatives, the loss of q is -log(exp(cos(q, p) / t) / sum over d of
exp(cos(q, d) / t)).

A pair of texts has a score s that says how similar they are, and c is the cosine of the two:

- ``cosine``: (c - s)^2, as sentence-transformers' ``CosineSimilarityLoss`` computes it.
- ``cosent``: log(1 + sum of exp((c' - c) / t) over all pairs (c, s) and (c', s') of the batch with
  s > s'). Su, "CoSENT: A more efficient sentence vector scheme than Sentence-BERT", 2022, as
  sentence-transformers' ``CoSENTLoss`` computes it. The loss of each pair is that of the batch.

With several dimensions the loss is the sum over them of the loss of embeddings that are cut to so
many values. Kusupati et al., "Matryoshka Representation Learning", 2022, as
sentence-transformers' ``MatryoshkaLoss`` computes it with weights of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.objectives.settings import Contrastive


def contrastive_losses(
    embeddings: Tensor,
    groups: Sequence[int],
    contrastive: Contrastive,
    scores: Tensor | None = None,
) -> Tensor:
    """Compute the loss of each query.

    Args:
        embeddings: (N, H) float32, of any length, in the order query, positive, negatives, query
            and so on.
        groups: the number of texts of each query: itself, its positive and its negatives. Losses of
            pairs have no negatives.
        scores: (queries,) float32, for losses of pairs.

    Returns:
        (queries,) float32, with a gradient for `embeddings`.
    """
    total = embeddings.new_zeros(len(groups))
    for dimension in contrastive.dimensions or (embeddings.shape[1],):
        unit = F.normalize(embeddings[:, :dimension], dim=-1)
        if scores is None:
            total = total + _infonce(unit, groups, contrastive.temperature)
        else:
            total = total + _of_pairs(unit, scores, contrastive)
    return total


def _infonce(unit: Tensor, groups: Sequence[int], temperature: float) -> Tensor:
    """Compute the losses (queries,) from embeddings of length 1."""
    queries = torch.tensor([0, *accumulate(groups)][:-1])
    of_documents = torch.ones(len(unit), dtype=torch.bool)
    of_documents[queries] = False
    rank = of_documents.cumsum(0) - 1  # a text's number among the documents
    positives = to_device(rank[queries + 1], unit.device)
    documents = to_device(of_documents.nonzero()[:, 0], unit.device)
    queries = to_device(queries, unit.device)
    cosines = unit.index_select(0, queries) @ unit.index_select(0, documents).T
    return F.cross_entropy(cosines / temperature, positives, reduction="none")


def _of_pairs(unit: Tensor, scores: Tensor, contrastive: Contrastive) -> Tensor:
    """Compute the losses (pairs,) from embeddings of length 1 and scores (pairs,)."""
    cosines = (unit[::2] * unit[1::2]).sum(-1)
    if contrastive.kind == "cosine":
        return (cosines - scores).square()
    gaps = (cosines[None] - cosines[:, None]) / contrastive.temperature
    gaps = gaps.where(scores[:, None] > scores, -torch.inf)
    return torch.cat([gaps.new_zeros(1), gaps.flatten()]).logsumexp(0).expand(len(scores))
