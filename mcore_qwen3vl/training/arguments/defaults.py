"""Defaults for arguments that the command line leaves out and Megatron has no value for."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.runtime.cuda import c_compiler

SEQ_LENGTH = 8192
"""Default row length, for ``data check`` too; less if the model has fewer positions."""


DTYPES = {"bf16", "fp16", "fp32"}


def run_defaults(
    architecture: Architecture, explicit: Collection[str], *, cpu: bool
) -> dict[str, Any]:
    """Return the default of each argument not in `explicit`, by ``dest`` name.

    :func:`statement` reports them to the user.
    """
    defaults: dict[str, Any] = {
        "micro_batch_size": 1,
        "seq_length": min(SEQ_LENGTH, architecture.max_position_embeddings),
        "lr": 1e-5,
        "log_interval": 10,
    }
    if not {"seq_length", "packing"} & set(explicit):
        defaults["pad_to_longest"] = True  # rows of the full length would be mostly padding
    if not cpu and not DTYPES & set(explicit):
        defaults["bf16"] = True  # fused attention and Transformer Engine's packed attention need it
    if not cpu and c_compiler() is not None:
        defaults["compile_pointwise"] = True
    if "save" in explicit:
        defaults["save_interval"] = 500
    return {name: value for name, value in defaults.items() if name not in explicit}


def statement(args: argparse.Namespace, explicit: Collection[str]) -> str | None:
    """Return the flags that were not given, with the values in use; None if all were given."""
    names = ["micro_batch_size", "global_batch_size", "seq_length", "lr", "log_interval"]
    if args.save:
        names.append("save_interval")
    taken = [f"--{n.replace('_', '-')} {getattr(args, n)}" for n in names if n not in explicit]
    if args.bf16 and "bf16" not in explicit:
        taken.append("--bf16")
    if args.compile_pointwise and "compile_pointwise" not in explicit:
        taken.append("--compile-pointwise")
    if args.pad_to_longest and "pad_to_longest" not in explicit:
        taken.append("--pad-to-longest")
    return " ".join(taken) or None
