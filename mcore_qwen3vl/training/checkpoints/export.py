"""Export of Hugging Face checkpoints from a running job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model
from megatron.training import training
from megatron.training.utils import print_rank_0

from mcore_qwen3vl.converters.live.export import save_hf
from mcore_qwen3vl.training.lora.lora_run import LoraRun


def export(
    args: argparse.Namespace,
    model: list[Any],
    optimizer: Any,
    iteration: int,
    lora: LoraRun | None = None,
) -> Path:
    """Write ``--save-hf`` ``/iter_NNNNNNN``: weights, config, tokenizer and processor.

    Args:
        args: the arguments that :func:`mcore_qwen3vl.training.arguments.parser.parse` returns.
        model: this rank's pipeline chunks.
        optimizer: its overlapped parameter gathers are finished first.
        iteration: appears in the folder's name.
        lora: if given, a PEFT adapter is written instead.

    Returns:
        The folder.
    """
    if training.should_disable_forward_pre_hook(args):
        training.force_param_sync(model, optimizer=optimizer)
    folder = export_folder(args, iteration)
    if lora is None:
        save_hf(unwrap_model(model), folder, hf_config=args.hf_model, force=True)
    else:
        lora.export(unwrap_model(model), folder)
    print_rank_0(f"exported iteration {iteration} to {folder}")
    return folder


def export_folder(args: argparse.Namespace, iteration: int) -> Path:
    """Return the folder for the export of an iteration."""
    return Path(args.save_hf) / f"iter_{iteration:07d}"
