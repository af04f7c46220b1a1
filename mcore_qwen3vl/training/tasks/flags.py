"""The flags of embedding training, and checks of them before anything is built."""

from __future__ import annotations

import argparse

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import Contrastive
from mcore_qwen3vl.training.lora.flags import adapter_config
from mcore_qwen3vl.training.lora.flags import asked as asks_for_lora
from mcore_qwen3vl.training.preference.flags import refuse_router_losses, refuse_without

TASK = "embedding"
_DETAILS = ("temperature", "matryoshka_dims")


def add_embedding_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of embedding training to `group`."""
    group.add_argument(
        "--task",
        choices=(TASK,),
        help="embedding: train the embedding at the last token with the contrastive loss, on "
        "retrieval records; the model has no lm_head, and is written without one",
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


def is_embedding(args: argparse.Namespace) -> bool:
    """Return whether the run trains an embedding model."""
    return bool(args.task == TASK)


def contrastive_of(args: argparse.Namespace) -> Contrastive:
    """Return the loss's settings from the flags.

    Raises:
        BadInput: a value is out of range.
    """
    temperature = Contrastive.temperature if args.temperature is None else args.temperature
    return Contrastive(temperature, tuple(args.matryoshka_dims or ()))


def check_embedding(args: argparse.Namespace, architecture: Architecture) -> None:
    """Check the flags of embedding training against the others.

    Raises:
        BadInput: flags do not fit together; the message names them and the remedy.
    """
    if not is_embedding(args):
        refuse_without(f"--task {TASK}", args, _DETAILS)
        return
    longest = max(contrastive_of(args).dimensions, default=0)
    if longest > architecture.hidden_size:
        raise BadInput(
            f"--matryoshka-dims {longest}: the model's embeddings have {architecture.hidden_size} "
            "values."
        )
    task = f"--task {TASK}"
    if args.loss != "cross_entropy":
        raise BadInput(f"--loss {args.loss} with {task}, which has its own loss: drop one of them.")
    if args.overlong == "truncate":
        raise BadInput(
            f"--overlong truncate with {task}: a text that is cut has another embedding. Leave "
            "the flag out: records that are too long are then left out."
        )
    if asks_for_lora(args):
        _check_adapter(adapter_config(args, architecture), args.hf_model)
    refuse_router_losses(args, task, "queries")


def _check_adapter(config: AdapterConfig, hf_model: str) -> None:
    if config.lora_dropout:
        raise BadInput(
            f"lora_dropout is {config.lora_dropout:g} with --task {TASK}: embeddings are computed "
            "twice in a step, and dropout would make them differ. Set it to 0."
        )
    from mcore_qwen3vl.converters.adapters.peft_model import HEAD, apply  # PEFT takes seconds
    from mcore_qwen3vl.converters.adapters.targets import specs

    applied = apply(config, hf_model)
    if HEAD in {*applied.saved, *specs(applied)}:
        raise BadInput(
            f"The adapter changes {HEAD} with --task {TASK}, whose model has no lm_head: leave it "
            "out of the targets and of modules_to_save."
        )
