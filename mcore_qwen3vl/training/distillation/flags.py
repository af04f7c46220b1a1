"""The flags of distillation, and checks of them before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_args

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import TEACHER_TOP_K, Distillation, Divergence, check_top_k
from mcore_qwen3vl.training.arguments.flag_table import add_flags
from mcore_qwen3vl.training.preference.flags import refuse_without

DISTILL = "distill"
"""Name of the loss for ``--loss``."""
_FLAGS = {f"distill_{field.name}": field.name for field in fields(Distillation)}
"""The settings by their arguments."""


def add_distillation_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of distillation to `group`."""
    default = Distillation()
    flags = {
        f"--distill-divergence {'|'.join(get_args(Divergence))}": "of the student from the "
        "teacher: forward KL (teacher || student), reverse KL (student || teacher) or "
        f"Jensen-Shannon; default {default.divergence}",
        "--distill-beta X": "with jsd: share of the teacher in the mixture, as in GKD; default "
        f"{default.beta}",
        "--distill-temperature X": "the logits of both are divided by this; give `mcore-qwen3vl "
        f"score` the same --temperature; default {default.temperature:g}",
        "--distill-alpha X": f"share of the cross entropy in the loss; default {default.alpha:g}",
        "--teacher DIR": "a teacher in memory, on the same GPUs: a checkpoint of any Qwen3-VL with "
        "the student's vocabulary, or hub id (default: the tokens that `mcore-qwen3vl score "
        "--top-k` wrote beside the data)",
        "--teacher-top-k K": "with --teacher: number of its likeliest tokens to learn from; "
        f"default {TEACHER_TOP_K}",
    }
    add_flags(group, flags)


def distillation_of(args: argparse.Namespace) -> Distillation:
    """Return the settings of distillation from the flags.

    Raises:
        BadInput: a value is out of range.
    """
    given = {name: getattr(args, flag) for flag, name in _FLAGS.items()}
    return Distillation(**{name: value for name, value in given.items() if value is not None})


def check_distillation(args: argparse.Namespace) -> None:
    """Check the flags of distillation against the others.

    Raises:
        BadInput: flags do not fit together; the message names them and the remedy.
    """
    if args.loss != DISTILL:
        refuse_without(f"--loss {DISTILL}", args, [*_FLAGS, "teacher", "teacher_top_k"])
        return
    _check_teacher(args)
    if distillation_of(args).divergence != "jsd":
        refuse_without("--distill-divergence jsd", args, ["distill_beta"])
    if args.overlong == "truncate" and not args.teacher:
        raise BadInput(
            f"--overlong truncate with --loss {DISTILL}: the teacher saw whole samples. Leave the "
            "flag out: samples that are too long are then left out."
        )
    if args.head_chunk == 0 or args.defer_embedding_wgrad_compute:
        flag = "--no-chunked-head" if args.head_chunk == 0 else "--defer-embedding-wgrad-compute"
        raise BadInput(
            f"{flag} with --loss {DISTILL}, which reads the logits in chunks: drop the flag."
        )


def _check_teacher(args: argparse.Namespace) -> None:
    """Check the flags of a live teacher, and set the number of its tokens if none is given."""
    if not args.teacher:
        refuse_without("--teacher DIR", args, ["teacher_top_k"])
    elif args.teacher_top_k is None:
        args.teacher_top_k = min(TEACHER_TOP_K, args.vocab_size)
    else:
        check_top_k("--teacher-top-k", args.teacher_top_k, args.vocab_size)
