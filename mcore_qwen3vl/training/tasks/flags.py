"""The flags of tasks other than predicting tokens, and checks of them before anything is built."""

from __future__ import annotations

import argparse
from typing import get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.data.config import Task
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import ANSWERS, Contrastive, Ranking
from mcore_qwen3vl.training.lora.flags import adapter_config
from mcore_qwen3vl.training.lora.flags import asked as asks_for_lora
from mcore_qwen3vl.training.preference.flags import refuse_router_losses, refuse_without

_DETAILS = {
    "embedding": ("temperature", "matryoshka_dims"),
    "reranker": ("reranker_loss", "answers"),
}
"""By task, the flags that have a meaning with it alone."""

_UNITS = {"embedding": "queries", "reranker": "documents or queries", "reward": "pairs"}
"""By task, what its loss is a mean over."""


def add_task_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the tasks to `group`."""
    group.add_argument(
        "--task",
        choices=get_args(Task),
        help="embedding: train the embedding at the last token with the contrastive loss, on "
        "retrieval records; the model has no lm_head, and is written without one. reranker: train "
        "the answer, yes or no, to a query and a document of the same records. reward: train a "
        "score at the last token with the Bradley-Terry loss, on preference records; the model has "
        "the head `score` instead of lm_head",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="with --task embedding: cosines are divided by this; default "
        f"{Contrastive.temperature}",
    )
    group.add_argument(
        "--matryoshka-dims",
        type=int,
        nargs="+",
        metavar="N",
        help="with --task embedding: add up the losses of embeddings that are cut to each of these "
        "lengths; default: whole embeddings only",
    )
    group.add_argument(
        "--reranker-loss",
        choices=get_args(Ranking),
        help="with --task reranker: compare each document with its label (pointwise, the default), "
        "or all documents of a query with one another (listwise)",
    )
    group.add_argument(
        "--answers",
        nargs=2,
        metavar=("YES", "NO"),
        help="with --task reranker: the words, one token each, that mean relevant and irrelevant; "
        f"default: {' '.join(ANSWERS)}",
    )


def is_embedding(args: argparse.Namespace) -> bool:
    """Return whether the run trains an embedding model."""
    return bool(args.task == "embedding")


def labels_of(args: argparse.Namespace) -> int | None:
    """Return how many labels the model's head has; 0: it has no head; None: it has lm_head."""
    return {"embedding": 0, "reward": 1}.get(args.task)


def contrastive_of(args: argparse.Namespace) -> Contrastive:
    """Return the contrastive loss's settings from the flags.

    Raises:
        BadInput: a value is out of range.
    """
    temperature = Contrastive.temperature if args.temperature is None else args.temperature
    return Contrastive(temperature, tuple(args.matryoshka_dims or ()))


def ranking_of(args: argparse.Namespace) -> Ranking:
    """Return the reranker's loss from the flags."""
    chosen: Ranking = args.reranker_loss or "pointwise"
    return chosen


def answers_of(args: argparse.Namespace) -> tuple[str, str]:
    """Return the reranker's answers from the flags: relevant, irrelevant."""
    yes, no = args.answers or ANSWERS
    return yes, no


def check_task(args: argparse.Namespace, architecture: Architecture) -> None:
    """Check the flags of the tasks against the others.

    Raises:
        BadInput: flags do not fit together; the message names them and the remedy.
    """
    for other, details in _DETAILS.items():
        if args.task != other:
            refuse_without(f"--task {other}", args, details)
    if args.task is None:
        return
    longest = max(contrastive_of(args).dimensions, default=0)
    if longest > architecture.hidden_size:
        raise BadInput(
            f"--matryoshka-dims {longest}: the model's embeddings have {architecture.hidden_size} "
            "values."
        )
    task = f"--task {args.task}"
    if args.loss != "cross_entropy":
        raise BadInput(f"--loss {args.loss} with {task}, which has its own loss: drop one of them.")
    if args.overlong == "truncate":
        raise BadInput(
            f"--overlong truncate with {task}: the last token of a text that is cut is another "
            "one. Leave the flag out: records that are too long are then left out."
        )
    if labels_of(args) and args.pretrained_checkpoint:
        raise BadInput(
            f"--pretrained-checkpoint with {task}, which starts from Hugging Face weights: convert "
            "the checkpoint with `mcore-qwen3vl convert mcore-to-hf`, and give it to --load-hf."
        )
    if asks_for_lora(args):
        _check_adapter(adapter_config(args, architecture), args)
    refuse_router_losses(args, task, _UNITS[args.task])


def _check_adapter(config: AdapterConfig, args: argparse.Namespace) -> None:
    if config.lora_dropout and is_embedding(args):
        raise BadInput(
            f"lora_dropout is {config.lora_dropout:g} with --task embedding: embeddings are "
            "computed twice in a step, and dropout would make them differ. Set it to 0."
        )
    from mcore_qwen3vl.converters.adapters.peft_model import HEAD, apply  # PEFT takes seconds
    from mcore_qwen3vl.converters.adapters.targets import specs

    applied = apply(config, args.hf_model)
    if labels_of(args) is not None and HEAD in {*applied.saved, *specs(applied)}:
        raise BadInput(
            f"The adapter changes {HEAD} with --task {args.task}, whose model has no lm_head: "
            "leave it out of the targets and of modules_to_save."
        )
    if HEAD in specs(applied):
        raise BadInput(
            f"The adapter has factors on {HEAD} with --task {args.task}, which reads two of its "
            "rows: leave it out of the targets, or name it in modules_to_save."
        )
