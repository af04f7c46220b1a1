"""Reranker training: the logits of ``yes`` and ``no`` after a query and a document."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loading.loader import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.ranking import ranking_losses
from mcore_qwen3vl.objectives.settings import Ranking
from mcore_qwen3vl.training.step.forward import Run
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units
from mcore_qwen3vl.training.tasks.pooling import answers, pooled


def judge(folder: str | Path, words: tuple[str, str]) -> Run:
    """Return what runs a micro-batch, whose values are the logits (N, 2) of two words.

    Args:
        folder: Hugging Face directory of the tokenizer.
        words: the answers that mean relevant and irrelevant.

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


def of_documents(ranking: Ranking) -> Objective:
    """Return the objective of reranker training: a mean over the global batch.

    Args:
        ranking: the kind of loss, over documents (``pointwise``) or queries (``listwise``).
    """

    def objective(batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
        losses, right = ranking_losses(relevance(logits), batch.groups, ranking)
        return of_units(losses.sum(), batch, {"reranker loss": losses, "accuracy": right})

    return objective


def relevance(logits: Tensor) -> Tensor:
    """Return each document's logit of relevance (N,), from the logits (N, 2) of the answers.

    The sigmoid of it is the score of Qwen3-VL-Reranker.
    """
    return logits[:, 0] - logits[:, 1]
