"""The objectives of tasks, means over the global batch, and what computes their values."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loader import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.objectives.preference import reward_losses
from mcore_qwen3vl.objectives.ranking import classification_losses, ranking_losses
from mcore_qwen3vl.objectives.settings import Ranking
from mcore_qwen3vl.training.step.forward import Run
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units
from mcore_qwen3vl.training.tasks.contrastive import EMBED, of_queries
from mcore_qwen3vl.training.tasks.flags import answers_of, contrastive_of, labels_of, ranking_of
from mcore_qwen3vl.training.tasks.pooling import SCORES, answers, pooled


def objective_of(args: argparse.Namespace) -> tuple[Objective, Run]:
    """Return the objective of ``--task``, and what runs a micro-batch for it.

    Raises:
        BadInput: a reranker's answer is not a single token.
    """
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


def judge(folder: str | Path, words: tuple[str, str]) -> Run:
    """Return what runs a micro-batch, whose values are the logits (N, 2) of two words.

    Raises:
        BadInput: a word is not a single token.
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
    return pooled(partial(answers, tokens))


def relevance(logits: Tensor) -> Tensor:
    """Return each document's logit of relevance (N,), from the logits (N, 2) of the answers.

    The sigmoid of it is the score of Qwen3-VL-Reranker.
    """
    return logits[:, 0] - logits[:, 1]
