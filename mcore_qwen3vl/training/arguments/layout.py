"""The layout that a run's flags describe, checked before anything is built."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

OWN_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Splits over the pipeline that `Layout` does not describe; Megatron checks them.

Any two stages may differ in them.
"""


def validated_layout(args: argparse.Namespace) -> Layout:
    """Return the layout of arguments that Megatron has validated."""
    layout = Layout.from_flags(args, args.world_size, moe=bool(args.num_experts))
    # Megatron sets a dense model's ETP to TP too.
    return layout if args.num_experts else replace(layout, etp=1)


def check_layout(args: argparse.Namespace, architecture: Architecture, world_size: int) -> Layout:
    """Return the layout of flags that need not be validated yet.

    If the model or the ranks cannot be divided so, BadInput names both numbers and what to change.
    """
    layout = Layout.from_flags(args, world_size, moe=architecture.is_moe)
    if any(getattr(args, name) for name in OWN_SPLIT):
        layout = replace(layout, pp=1, vpp=1, first=None, last=None)
    # `checks` refuses what only training forbids, by its flag.
    layout.validate(architecture, training=False)
    tp, pp, cp = layout.tp, args.pipeline_model_parallel_size, layout.cp
    if world_size % (tp * pp * cp):
        raise BadInput(
            f"The world size is {world_size}, which TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp} "
            "does not divide: change the number of ranks (train --processes N, rehearse --gpus N) "
            "or these sizes."
        )
    rows, batch = args.micro_batch_size * layout.dp, args.global_batch_size
    if batch and batch % rows:
        raise BadInput(
            f"--global-batch-size {batch} is not a multiple of the {rows} rows of a pass: "
            f"micro-batches of {args.micro_batch_size} on {layout.dp} data-parallel ranks. Give "
            f"--global-batch-size {-(-batch // rows) * rows}."
        )
    return layout
