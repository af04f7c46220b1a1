"""A legacy checkpoint belongs to one layout and one layer spec: checked before Megatron reads it.

Megatron exits with code 0 when a rank's file is not there. A virtual stage that the file does not
have keeps its random values, and so do parameters whose names are another spec's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.legacy.files import saved_arguments
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
        BadInput: it is for another layout or layer spec, where the message names both values; or
            its optimizer's state is of other parameters.
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
    if folder.name != RELEASE and not (args.finetune or args.no_load_optim):
        _check_experts(folder, saved, args)


def _check_experts(folder: Path, saved: argparse.Namespace, args: argparse.Namespace) -> None:
    """The optimizer's state has no names: it lies in the order of the parameters.

    Experts of the torch spec were a parameter each, and are all in one now.
    """
    apart = not getattr(saved, "moe_grouped_gemm", True)
    if args.num_experts and args.spec == ["torch"] and apart:
        raise BadInput(
            f"{folder} is a legacy checkpoint in which each expert is a parameter of its own, "
            "so its optimizer state does not fit this version. Continue from its weights with "
            "--no-load-optim."
        )


def _shown(value: Any) -> str:
    """Shorten a value from a file for a message: only these kinds are sure to be short."""
    plain = value is None or isinstance(value, int | str)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        plain = True
    return f"{value!s:.80}" if plain else f"a {type(value).__name__}"
