"""The Megatron flags that most runs set, with our own help texts and defaults."""

from __future__ import annotations

import argparse

from mcore_qwen3vl.training.arguments.defaults import SEQ_LENGTH

COMMON = (
    ("--data-path", "PATH", "training data; several data sets: WEIGHT PATH WEIGHT PATH ..."),
    ("--valid-data-path", "PATH", "validation data, with --eval-iters and --eval-interval"),
    ("--eval-iters", "N", "global batches per validation; default: 0, none"),
    ("--eval-interval", "N", "steps between validations; default: 1000"),
    ("--save", "DIR", "write checkpoints here; the same command again resumes from there"),
    ("--save-interval", "N", "steps between checkpoints; default: 500"),
    ("--load", "DIR", "checkpoint directory to resume from; default: the one of --save"),
    ("--pretrained-checkpoint", "DIR", "start from the weights of this Megatron-Core checkpoint"),
    ("--train-iters", "N", "steps of the whole run, resumed ones included"),
    ("--lr", "X", "highest learning rate; default: 1e-5"),
    ("--min-lr", "X", "learning rate at the end"),
    ("--lr-decay-style", "STYLE", "constant, linear, cosine, inverse-square-root or WSD"),
    ("--lr-warmup-iters", "N", "warm-up steps, in which the learning rate rises"),
    ("--weight-decay", "X", "weight decay of AdamW"),
    ("--clip-grad", "X", "clip the gradient's norm to this"),
    ("--micro-batch-size", "N", "samples, or packs, in a micro-batch; default: 1"),
    (
        "--global-batch-size",
        "N",
        "samples, or packs, in a step; default: a micro-batch for each data-parallel rank",
    ),
    (
        "--seq-length",
        "N",
        f"longest sample, or length of a pack; default: {SEQ_LENGTH}, or the model's",
    ),
    ("--tensor-model-parallel-size", "N", "TP: ranks among which every layer is divided"),
    ("--sequence-parallel", None, "SP: divide the sequence between layers among the TP ranks too"),
    ("--pipeline-model-parallel-size", "N", "PP: ranks among which the layers are divided"),
    ("--context-parallel-size", "N", "CP: ranks among which a sequence is divided"),
    ("--expert-model-parallel-size", "N", "EP: ranks among which the experts are divided"),
    (
        "--use-distributed-optimizer",
        None,
        "divide the optimizer's state among the data-parallel ranks",
    ),
    (
        "--recompute-granularity",
        "WHAT",
        "full or selective recomputation: less memory, more compute",
    ),
    ("--bf16", None, "compute in bfloat16; the default on GPUs"),
    ("--spec", "NAME", "te: Transformer Engine, the default on GPUs; torch: without it"),
    ("--seed", "N", "seed of the data order and of the model's random numbers"),
    ("--num-workers", "N", "data-preparation processes per rank"),
    ("--log-interval", "N", "steps between log lines; default: 10"),
    ("--tensorboard-dir", "DIR", "write TensorBoard's files here"),
    ("--wandb-project", "NAME", "log to Weights & Biases"),
)


def add_common(group: argparse._ArgumentGroup) -> None:
    """Add the common flags to a parser without Megatron's, for printing its help."""
    for flag, metavar, text in COMMON:
        shape = {"action": "store_true"} if metavar is None else {"metavar": metavar}
        group.add_argument(flag, help=text, **shape)  # type: ignore[arg-type]
