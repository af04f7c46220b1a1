"""What a run of a task computes from its flags."""

from __future__ import annotations

import argparse

from mcore_qwen3vl.training.step.forward import Run
from mcore_qwen3vl.training.step.losses import Objective
from mcore_qwen3vl.training.tasks.classify import of_labels
from mcore_qwen3vl.training.tasks.contrastive import EMBED, of_queries
from mcore_qwen3vl.training.tasks.flags import (
    answers_of,
    contrastive_of,
    is_embedding,
    labels_of,
    ranking_of,
)
from mcore_qwen3vl.training.tasks.pooling import SCORES
from mcore_qwen3vl.training.tasks.reranker import judge, of_documents
from mcore_qwen3vl.training.tasks.reward import of_rewards


def objective_of(args: argparse.Namespace) -> tuple[Objective, Run]:
    """Return the objective of ``--task``, and what runs a micro-batch for it.

    Raises:
        BadInput: a reranker's answer is not a single token.
    """
    if is_embedding(args):
        return of_queries(contrastive_of(args)), EMBED
    if args.task == "reward":
        return of_rewards, SCORES
    if labels := labels_of(args):
        return of_labels(labels), SCORES
    return of_documents(ranking_of(args)), judge(args.hf_model, answers_of(args))
