"""Check that a legacy checkpoint fits a run's layout and layer spec, before Megatron reads it.

Megatron itself exits with code 0 if a rank's file is missing. A virtual stage that is missing from
the file keeps its random values, and so do parameters that another spec names differently.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.legacy.files import open_ranks, saved_arguments
from mcore_qwen3vl.converters.mcore.formats import require_own_keys
from mcore_qwen3vl.converters.mcore.paths import RELEASE
from mcore_qwen3vl.errors import BadInput

_COMPARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_COMPARED_IN_MOE = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def check_run(folder: Path, args: argparse.Namespace) -> None:
    """Check that the legacy checkpoint in `folder` is for the run that `args` describe.

    Raises:
        BadInput: the checkpoint is for another layout or layer spec (the message names both
            values), is another maker's, or its optimizer state is for other parameters.
    """
    saved = saved_arguments(folder)
    names = [*_COMPARED, *(_COMPARED_IN_MOE if args.num_experts else ())]
    if getattr(saved, "spec", None) is not None:  # Megatron's own models have none
        names.append("spec")
    different = [
        f"{name} {_shown(getattr(saved, name))} instead of {getattr(args, name)}"
        for name in names
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if different:
        raise BadInput(
            f"{folder} is a legacy checkpoint, which loads only under its own layout. It was "
            f"saved with {', '.join(different)}. Change the flags, or convert it: mcore-qwen3vl "
            "convert mcore-to-hf, then --load-hf."
        )
    require_own_keys(folder, open_ranks(folder)[0].models[0])
    if folder.name != RELEASE and not (args.finetune or args.no_load_optim):
        _check_experts(folder, saved, args)


def _check_experts(folder: Path, saved: argparse.Namespace, args: argparse.Namespace) -> None:
    """Raise BadInput if the checkpoint's experts are parameters of their own.

    The optimizer's state has no names, only the order of the parameters. Each expert of the torch
    spec used to be one parameter; now one parameter holds all experts.
    """
    apart = not getattr(saved, "moe_grouped_gemm", True)
    if args.num_experts and args.spec == ["torch"] and apart:
        raise BadInput(
            f"{folder} is a legacy checkpoint in which each expert is a parameter of its own, "
            "so its optimizer state does not fit this version. Continue from its weights with "
            "--no-load-optim."
        )


def _shown(value: Any) -> str:
    """Shorten a value from a file for a message; only these types are sure to give short text."""
    plain = value is None or isinstance(value, int | str)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        plain = True
    return f"{value!s:.80}" if plain else f"a {type(value).__name__}"
