"""What a run takes where the command line says nothing and Megatron has no value."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from mcore_qwen3vl.config import Architecture

SEQ_LENGTH = 8192
"""The default of ``data check`` too; less where the model has fewer positions."""


DTYPES = {"bf16", "fp16", "fp32"}


def run_defaults(
    architecture: Architecture, explicit: Collection[str], *, cpu: bool
) -> dict[str, Any]:
    """Values by ``dest`` name of what is not `explicit`; they are stated by :func:`statement`."""
    defaults: dict[str, Any] = {
        "micro_batch_size": 1,
        "seq_length": min(SEQ_LENGTH, architecture.max_position_embeddings),
        "lr": 1e-5,
        "log_interval": 10,
    }
    if not {"seq_length", "packing"} & set(explicit):
        defaults["pad_to_longest"] = True  # rows of that length would be padding for the most part
    if not cpu and not DTYPES & set(explicit):
        defaults["bf16"] = True  # fused attention, and Transformer Engine's for packs, want it
    if "save" in explicit:
        defaults["save_interval"] = 500
    return {name: value for name, value in defaults.items() if name not in explicit}


def statement(args: argparse.Namespace, explicit: Collection[str]) -> str | None:
    """The flags that were not given, with the values that Megatron has worked out; None: none."""
    names = ["micro_batch_size", "global_batch_size", "seq_length", "lr", "log_interval"]
    if args.save:
        names.append("save_interval")
    taken = [f"--{n.replace('_', '-')} {getattr(args, n)}" for n in names if n not in explicit]
    if args.bf16 and "bf16" not in explicit:
        taken.append("--bf16")
    if args.pad_to_longest and "pad_to_longest" not in explicit:
        taken.append("--pad-to-longest")
    return " ".join(taken) or None
