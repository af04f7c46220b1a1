"""Losses as pure functions: of preferences, embeddings, rankings and classes, and of a student.

Other losses of single tokens, such as cross entropy, are in `mcore_qwen3vl.training.forward_step`.

Preferences
-----------

The losses over pairs of a chosen and a rejected answer are DPO and its relatives, SimPO and ORPO.
Source: Rafailov et al., "Direct Preference Optimization", 2023. With the policy p, the reference p0
and s = (log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected)), the losses are:

- ``sigmoid``: -log sigmoid(beta s); smoothed, Mitchell's "A note on DPO with noisy preferences",
  2023: -(1 - e) log sigmoid(beta s) - e log sigmoid(-beta s).
- ``hinge``: max(0, 1 - beta s). Zhao et al., "SLiC-HF", 2023, as Liu et al., "RSO",
  2023, normalise it.
- ``ipo``: (s - 1 / (2 beta))^2, where s has mean log-probabilities over an answer's tokens. Azar et
  al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023; the
  mean is as in TRL, on the authors' advice.

Two losses have no reference. With m, the mean log-probability of an answer's tokens, they are:

- ``simpo``: -log sigmoid(beta (m(chosen) - m(rejected)) - gamma). Meng et al., "SimPO", 2024.
- ``orpo``: -beta log sigmoid(o(chosen) - o(rejected)) with the log-odds o = m - log(1 - exp(m)).
  Hong et al., "ORPO", 2024, who add the loss of the chosen answer with weight 1.

To each of them, alpha times the chosen answer's mean negative log-likelihood over its tokens can be
added. Pang et al., "Iterative Reasoning Preference Optimization", 2024.

KTO has answers that are labelled as wanted or unwanted. Source: Ethayarajh et al., "KTO: Model
Alignment as Prospect Theoretic Optimization", 2024, as TRL's ``KTOTrainer`` computes it. With
r = log p(y | x) - log p0(y | x) of an answer y to a prompt x, and the baseline z, the loss is

- w (1 - sigmoid(beta (r - z))) of a wanted answer, with the weight w of wanted answers;
- u (1 - sigmoid(beta (z - r))) of an unwanted answer, with the weight u of unwanted answers.

The baseline estimates the KL divergence of the policy from the reference. It is the mean of r over
the batch with each prompt followed by another's answer, and at least 0. It has no gradient.

Embeddings
----------

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

Rerankers and classifiers
-------------------------

A reranker's losses are over the documents of each query, of which the first is the right one:

- ``pointwise``: binary cross entropy of each document by itself.
- ``listwise``: cross entropy of the right document among those of its query. Cao et al., "Learning
  to Rank: From Pairwise Approach to Listwise Approach", 2007, with one right document (ListNet).

Distillation
------------

A divergence says how far a student's distribution is from a teacher's at a token. Both are given as
the probabilities of the teacher's k likeliest tokens and of all other tokens together, so they are
distributions over k + 1 outcomes. Their divergence is at most that over the whole vocabulary, by
the data-processing inequality, and equals it if nothing is left over.

- ``forward``: KL(teacher || student);
- ``reverse``: KL(student || teacher);
- ``jsd``: generalised Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta)
  KL(student || m), with the mixture m = beta teacher + (1 - beta) student. Source: Agarwal et al.,
  "On-Policy Distillation of Language Models" (GKD), 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.objectives.settings import Contrastive, Distillation, Kto, Preference, Ranking


def pair_losses(
    log_probs: Tensor, reference: Tensor | None, lengths: Tensor, preference: Preference
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each pair.

    Args:
        log_probs: (P, 2) float32, the policy's log-probabilities of the chosen and the rejected
            answer, summed over tokens.
        reference: (P, 2), the reference's log-probabilities, without a gradient; None for a loss
            without a reference.
        lengths: (P, 2), the answers' numbers of tokens.

    Returns:
        The losses (P,), and the rewards (P, 2) without a gradient, float32: beta (log p - log p0),
        or without a reference beta m.
    """
    change = log_probs / lengths if reference is None else log_probs - reference
    rewards = (preference.beta * change).detach()
    if preference.kind == "ipo":
        change = change / lengths
    elif preference.kind == "orpo":
        change = _log_odds(change)
    gap = change[:, 0] - change[:, 1]
    if preference.kind in ("sigmoid", "simpo"):
        wrong, scaled = preference.label_smoothing, preference.beta * gap - preference.gamma
        losses = -(1 - wrong) * F.logsigmoid(scaled)
        if wrong:
            losses = losses - wrong * F.logsigmoid(-scaled)
    elif preference.kind == "orpo":
        losses = -preference.beta * F.logsigmoid(gap)
    elif preference.kind == "hinge":
        losses = F.relu(1 - preference.beta * gap)
    else:
        losses = (gap - 1 / (2 * preference.beta)).square()
    if preference.rpo_alpha:
        losses = losses - preference.rpo_alpha * log_probs[:, 0] / lengths[:, 0]
    return losses, rewards


def numbers_of_rewards(rewards: Tensor) -> dict[str, Tensor]:
    """Return the log's numbers (P,), by name, of the rewards (P, 2) of pairs.

    A pair is right, 1.0 and not 0.0, if the chosen answer's reward is the higher one.
    """
    chosen, rejected = rewards.unbind(1)
    return {
        "rewards chosen": chosen,
        "rewards rejected": rejected,
        "rewards margin": chosen - rejected,
        "rewards accuracy": (chosen - rejected > 0).float(),
    }


def _log_odds(means: Tensor) -> Tensor:
    """Return log(p / (1 - p)) with a finite gradient, where `means` is log p <= 0.

    The two forms of log(1 - p) are exact on either side of p = 1/2.
    """
    means = means.clamp(max=-torch.finfo(means.dtype).eps)  # p is 1 to rounding
    low, high = torch.log1p(-means.exp()), torch.log(-torch.expm1(means))
    return means - torch.where(means < -math.log(2), low, high)


def labelled_losses(
    log_probs: Tensor, reference: Tensor, desirable: Tensor, baseline: Tensor, kto: Kto
) -> tuple[Tensor, Tensor]:
    """Compute KTO's loss of each answer.

    Args:
        log_probs: (N,) float32, the policy's log-probabilities of the answers, summed over tokens.
        reference: (N,), the reference's log-probabilities, without a gradient.
        desirable: (N,) bool, whether an answer is wanted.
        baseline: scalar without a gradient, the mean of r for answers of other prompts.

    Returns:
        The losses (N,), and the rewards beta r (N,) without a gradient.
    """
    change = log_probs - reference
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    gap = change - baseline.clamp(min=0)
    losses = weight * (1 - torch.sigmoid(kto.beta * sign * gap))
    return losses, (kto.beta * change).detach()


def reward_losses(rewards: Tensor, margins: Tensor) -> Tensor:
    """Compute the Bradley-Terry loss (P,) of each pair, with which reward models are trained.

    It is -log sigmoid(r(chosen) - r(rejected) - margin). Source: Ouyang et al., "Training language
    models to follow instructions with human feedback", 2022; the margin is that of Touvron et al.,
    "Llama 2", 2023, as in TRL's ``RewardTrainer``.

    Args:
        rewards: (P, 2) float32, of the chosen and the rejected answer.
        margins: (P,) float32, by how much the chosen answer is better.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)


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
            total = total + _infonce_losses(unit, groups, contrastive.temperature)
        else:
            total = total + _similarity_losses(unit, scores, contrastive)
    return total


def _infonce_losses(unit: Tensor, groups: Sequence[int], temperature: float) -> Tensor:
    """Compute the losses (queries,) from embeddings of length 1."""
    queries = torch.tensor([0, *accumulate(groups)][:-1])  # the first text of each group
    of_documents = torch.ones(len(unit), dtype=torch.bool)
    of_documents[queries] = False
    rank = of_documents.cumsum(0) - 1  # a text's number among the documents
    positives = to_device(rank[queries + 1], unit.device)
    documents = to_device(of_documents.nonzero()[:, 0], unit.device)
    queries = to_device(queries, unit.device)
    cosines = unit.index_select(0, queries) @ unit.index_select(0, documents).T
    return F.cross_entropy(cosines / temperature, positives, reduction="none")


def _similarity_losses(unit: Tensor, scores: Tensor, contrastive: Contrastive) -> Tensor:
    """Compute the losses (pairs,) from embeddings of length 1 and scores (pairs,)."""
    cosines = (unit[::2] * unit[1::2]).sum(-1)
    if contrastive.kind == "cosine":
        return (cosines - scores).square()
    gaps = (cosines[None] - cosines[:, None]) / contrastive.temperature
    gaps = gaps.where(scores[:, None] > scores, -torch.inf)
    # The zero before them is the 1 in the logarithm.
    return torch.cat([gaps.new_zeros(1), gaps.flatten()]).logsumexp(0).expand(len(scores))


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
    logits: Tensor, right: Tensor, *, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each record, as HF's ``ForSequenceClassificationLoss`` does.

    Args:
        logits: (N, labels) float32.
        right: (N, labels) float32, 1 for labels that are right and 0 for others.
        exclusive: whether one label is right, so that they exclude one another: cross entropy.
            Otherwise each label is judged by itself: the mean of their binary cross entropies.

    Returns:
        Losses (N,) float32, with a gradient for `logits`; and for each 1.0 if all its labels are
        predicted right, else 0.0.
    """
    if exclusive:
        losses = F.cross_entropy(logits, right, reduction="none")
        return losses, (logits.argmax(1) == right.argmax(1)).float()
    losses = F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
    return losses, ((logits > 0) == (right > 0)).all(1).float()


def divergences(student: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Return the divergence at each token.

    Args:
        student: (..., k + 1) log-probabilities of the teacher's likeliest tokens and of the rest.
        teacher: the teacher's, without a gradient.

    Returns:
        (...), with a gradient for `student`. It is not multiplied by the squared temperature.
    """
    if settings.divergence == "forward":
        return _kl(teacher, student)
    if settings.divergence == "reverse":
        return _kl(student, teacher)
    beta = settings.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) over the last axis, from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
