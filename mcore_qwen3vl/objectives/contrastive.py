"""The contrastive loss of embedding models: InfoNCE with in-batch and hard negatives.

Source: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018, as
sentence-transformers' ``MultipleNegativesRankingLoss`` computes it, whose scale is 1 / temperature.
With the query q, its positive p and the documents d of the batch, which are all positives and all
hard negatives, the loss of q is -log(exp(cos(q, p) / t) / sum over d of exp(cos(q, d) / t)).

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
    embeddings: Tensor, groups: Sequence[int], contrastive: Contrastive
) -> Tensor:
    """Compute the loss of each query.

    Args:
        embeddings: (N, H) float32, of any length, in the order query, positive, negatives, query
            and so on.
        groups: the number of texts of each query: itself, its positive and its negatives.
        contrastive: the loss's settings.

    Returns:
        (queries,) float32, with a gradient for `embeddings`.
    """
    queries = torch.tensor([0, *accumulate(groups)][:-1])
    of_documents = torch.ones(len(embeddings), dtype=torch.bool)
    of_documents[queries] = False
    rank = of_documents.cumsum(0) - 1  # a text's number among the documents
    positives = to_device(rank[queries + 1], embeddings.device)
    documents = to_device(of_documents.nonzero()[:, 0], embeddings.device)
    queries = to_device(queries, embeddings.device)
    total = embeddings.new_zeros(len(groups))
    for dimension in contrastive.dimensions or (embeddings.shape[1],):
        unit = F.normalize(embeddings[:, :dimension], dim=-1)
        cosines = unit.index_select(0, queries) @ unit.index_select(0, documents).T
        total = total + F.cross_entropy(
            cosines / contrastive.temperature, positives, reduction="none"
        )
    return total
