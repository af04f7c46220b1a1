"""The layout that Megatron's flags describe, checked before anything is built."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.arguments.refusal import StrictParser
from mcore_qwen3vl.training.arguments.resets import take_back

_SIZES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
)
_OPTIONAL_SIZES = (
    "--expert-tensor-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
_OWN_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Splits over the pipeline that `Layout` does not describe; Megatron checks them."""


def check_layout_flags(argv: Sequence[str], architecture: Architecture, world_size: int) -> None:
    """Run :func:`check_layout` before ranks are started, without importing megatron.

    Raises:
        BadInput: see :func:`check_layout`.
    """
    parser = StrictParser(allow_abbrev=False, add_help=False)
    for flag in _SIZES:
        parser.add_argument(flag, type=int, default=1)
    for flag in _OPTIONAL_SIZES:
        parser.add_argument(flag, type=int)
    parser.add_argument("--sequence-parallel", action="store_true")
    for name in _OWN_SPLIT:
        parser.add_argument("--" + name.replace("_", "-"), nargs="?", const=True)
    parser.add_argument("--pipeline-model-parallel-layout")
    check_layout(parser.parse_known_args(take_back(argv))[0], architecture, world_size)


def data_parallel_size(args: argparse.Namespace, world_size: int) -> int:
    """Return how many of `world_size` ranks hold the same part of the model."""
    sizes = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    return world_size // math.prod(sizes)


def check_layout(args: argparse.Namespace, architecture: Architecture, world_size: int) -> None:
    """Check that the model and the ranks can be divided as the flags say.

    Raises:
        BadInput: a size does not divide; the message names both numbers and what to change.
    """
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    own_split = any(getattr(args, name) for name in _OWN_SPLIT)
    layout = Layout(
        tp=tp,
        pp=1 if own_split else pp,
        vpp=1 if own_split else args.num_virtual_stages_per_pipeline_rank or 1,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or (tp if architecture.is_moe else 1),
        cp=cp,
        dp=max(world_size // max(tp * pp * cp, 1), 1),
        sp=args.sequence_parallel and tp > 1,  # Megatron turns it off without TP
        first=None if own_split else args.decoder_first_pipeline_num_layers,
        last=None if own_split else args.decoder_last_pipeline_num_layers,
        split=args.pipeline_model_parallel_layout,
    )
    # `checks` refuses what only training forbids, by its flag.
    layout.validate(architecture, training=False)
    if world_size % (tp * pp * cp):
        raise BadInput(
            f"The world size is {world_size}, which TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp} "
            "does not divide: change the number of ranks (train --processes N, rehearse --gpus N) "
            "or these sizes."
        )
