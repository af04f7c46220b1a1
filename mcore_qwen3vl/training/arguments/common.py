"""The Megatron flags that most runs set, with our own help texts and defaults."""

from __future__ import annotations

import argparse

from mcore_qwen3vl.training.arguments.defaults import SEQ_LENGTH

COMMON = (
    ("--data-path", "PATH", "what to train on, or WEIGHT PATH WEIGHT PATH ... in turns"),
    ("--valid-data-path", "PATH", "what to validate on, with --eval-iters and --eval-interval"),
    ("--eval-iters", "N", "global batches of a validation; default: 0, none"),
    ("--eval-interval", "N", "steps from one validation to the next; default: 1000"),
    ("--save", "DIR", "write checkpoints here; the same command again resumes from there"),
    ("--save-interval", "N", "steps from one checkpoint to the next; default: 500"),
    ("--load", "DIR", "checkpoint to resume; default: what --save names"),
    ("--pretrained-checkpoint", "DIR", "start from these Megatron-Core weights"),
    ("--train-iters", "N", "steps of the whole run, resumed ones included"),
    ("--lr", "X", "highest learning rate; default: 1e-5"),
    ("--min-lr", "X", "learning rate at the end"),
    ("--lr-decay-style", "STYLE", "constant, linear, cosine, inverse-square-root or WSD"),
    ("--lr-warmup-iters", "N", "steps in which the learning rate rises"),
    ("--weight-decay", "X", "weight decay of AdamW"),
    ("--clip-grad", "X", "limit of the gradient's norm"),
    ("--micro-batch-size", "N", "rows that a rank computes at a time; default: 1"),
    ("--global-batch-size", "N", "rows of a step over all ranks; default: one micro-batch a rank"),
    ("--seq-length", "N", f"tokens of a row, at most; default: {SEQ_LENGTH}, or the model's"),
    ("--tensor-model-parallel-size", "N", "TP: ranks that share every layer"),
    ("--sequence-parallel", None, "SP: they share the sequence between layers too"),
    ("--pipeline-model-parallel-size", "N", "PP: ranks among which the layers are divided"),
    ("--context-parallel-size", "N", "CP: ranks that share a sequence"),
    ("--expert-model-parallel-size", "N", "EP: ranks that share the experts"),
    ("--use-distributed-optimizer", None, "the data-parallel ranks share the optimizer's state"),
    ("--recompute-granularity", "WHAT", "full or selective: less memory, more compute"),
    ("--bf16", None, "compute in bfloat16; the default on GPUs"),
    ("--spec", "NAME", "te: Transformer Engine, the default on GPUs; torch: without it"),
    ("--seed", "N", "seed of the data's order and of the model's random numbers"),
    ("--num-workers", "N", "processes of each rank that prepare data"),
    ("--log-interval", "N", "steps from one line of the log to the next; default: 10"),
    ("--tensorboard-dir", "DIR", "write TensorBoard's files here"),
    ("--wandb-project", "NAME", "log to Weights & Biases"),
)


def add_common(group: argparse._ArgumentGroup) -> None:
    """Add the common flags to a parser without Megatron's, for printing its help."""
    for flag, metavar, text in COMMON:
        shape = {"action": "store_true"} if metavar is None else {"metavar": metavar}
        group.add_argument(flag, help=text, **shape)  # type: ignore[arg-type]
