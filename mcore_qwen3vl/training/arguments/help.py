"""The help of the training command: all flags by group, or those about a word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.megatron_flags import Sorting
from mcore_qwen3vl.training.arguments.settings import SEQ_LENGTH, add_arguments

COMMON = {
    "--data-path PATH": "training data; several data sets: WEIGHT PATH WEIGHT PATH ...",
    "--valid-data-path PATH": "validation data, read once every --eval-interval steps",
    "--eval-iters N": "validate on the first N global batches; default: on all data; 0: never",
    "--eval-interval N": "steps between validations; default: 1000",
    "--save DIR": "write checkpoints here; the same command again resumes from there",
    "--save-interval N": "steps between checkpoints; default: 500",
    "--load DIR": "checkpoint directory to resume from; default: the one of --save",
    "--pretrained-checkpoint DIR": "start from the weights of this Megatron-Core checkpoint",
    "--train-iters N": "steps of the whole run, resumed ones included; or --num-epochs N",
    "--lr X": "highest learning rate; default: 1e-5",
    "--min-lr X": "learning rate at the end",
    "--lr-decay-style STYLE": "constant, linear, cosine, inverse-square-root or WSD",
    "--lr-warmup-iters N": "warm-up steps, in which the learning rate rises",
    "--weight-decay X": "weight decay of AdamW",
    "--clip-grad X": "clip the gradient's norm to this",
    "--micro-batch-size N": "samples, or packs, in a micro-batch; default: 1",
    "--global-batch-size N": "samples, or packs, in a step; default: a micro-batch for each "
    "data-parallel rank",
    "--seq-length N": f"longest sample, or length of a pack; default: {SEQ_LENGTH}, or the model's",
    "--tensor-model-parallel-size N": "TP: ranks among which every layer is divided",
    "--sequence-parallel": "SP: divide the sequence between layers among the TP ranks too",
    "--pipeline-model-parallel-size N": "PP: ranks among which the layers are divided",
    "--context-parallel-size N": "CP: ranks among which a sequence is divided",
    "--expert-model-parallel-size N": "EP: ranks among which the experts are divided",
    "--use-distributed-optimizer": "divide the optimizer's state among the data-parallel ranks",
    "--recompute-granularity WHAT": "full or selective recomputation: less memory, more compute",
    "--mtp-num-layers N": "train the MTP layer (mtp.*), of which Qwen3.5 has 1; default: exports "
    "copy it as it is",
    "--mtp-loss-scaling-factor X": "with --mtp-num-layers: weight of its loss; default: 0.1",
    "--bf16": "compute in bfloat16; the default on GPUs",
    "--spec NAME": "te: Transformer Engine, the default on GPUs; torch: without it",
    "--seed N": "seed of the data order and of the model's random numbers",
    "--num-workers N": "data-preparation processes per rank",
    "--log-interval N": "steps between log lines; default: 10",
    "--tensorboard-dir DIR": "write TensorBoard's files here",
    "--wandb-project NAME": "log to Weights & Biases",
}
"""The common flags of Megatron, by usage, for a help that is printed without its parser."""

PROGRAM = "mcore-qwen3vl train [--processes N]"
ASKS = frozenset({"-h", "--help"})


def help_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words after ``--help`` or ``-h`` in lower case; None if no help is asked for."""
    place = next((at for at, word in enumerate(argv) if word in ASKS), None)
    return None if place is None else [word.lower().lstrip("-") for word in argv[place + 1 :]]


def print_help(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Print the help for flags whose name, text or group has all `words`; BadInput if none has."""
    for group in parser._action_groups:
        kept = [a for a in group._group_actions if _is_about(a, group.title or "", words)]
        group._group_actions = kept
        for action in kept:
            _escape_percent(action)
    parser._action_groups = [group for group in parser._action_groups if group._group_actions]
    if not parser._action_groups:
        raise BadInput(f"No flag is about {' '.join(words)!r}: try another word, or a part of it.")
    parser.usage = "%(prog)s --hf-model DIR --data-path PATH [FLAG...]"
    parser.print_help()


def print_megatron_help(words: Sequence[str] = ()) -> NoReturn:
    """Print Megatron's flags and ours with :func:`print_help`, and exit; imports megatron."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Qwen3-VL training. --help WORD shows the flags about a word.",
        allow_abbrev=False,
        add_help=False,
    )
    add_arguments(add_megatron_arguments(parser))
    sorting = Sorting.for_installed()
    for kind, reasons in (("refused", sorting.refused), ("no effect", sorting.no_effect)):
        for flag, why in reasons.items():
            if action := parser._option_string_actions.get(flag):
                action.help = f"{kind}: {why}. {action.help or ''}"
    print_help(parser, words)
    sys.exit(0)


def _is_about(action: argparse.Action, group: str, words: Sequence[str]) -> bool:
    """Return whether a flag's name, text or group has all words; of no words any flag has all."""
    texts = [*action.option_strings, action.dest.replace("_", "-"), action.help or "", group]
    text = " ".join(texts).lower()
    return all(word in text for word in words)


def _escape_percent(action: argparse.Action) -> None:
    """Escape a bare ``%``, which some of Megatron's help texts have and argparse would format."""
    help = action.help or ""
    try:
        help % {**vars(action), "prog": "", "type": ""}
    except (ValueError, TypeError, KeyError):
        action.help = help.replace("%", "%%")
