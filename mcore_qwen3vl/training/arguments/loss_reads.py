"""What a loss reads of data, by its name and flags alone: for a check of the data before a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import add_flags
from mcore_qwen3vl.losses.registry import add_loss_flags, all_losses, refuse_other_losses_flags
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.training.arguments.command_line import CommandLine, StrictParser


def reads_of_loss(text: str, others: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the data config that a run's loss decides, with its sidecar.

    Args:
        text: a name for ``--loss`` or ``--task``, and behind it flags of the loss and of LoRA, on
            which depends where a reference comes from.
        others: words of the run's command line about its model and its data.

    Raises:
        BadInput: there is no such loss or flag, or a flag is not for this loss.
    """
    name, *words = _words_of(text)
    # All other flags would have no effect, so that this parser does not know them.
    parser = StrictParser(allow_abbrev=False, add_help=False)
    add_flags(parser.add_argument_group(), LoraSettings)
    add_loss_flags(parser)
    flags = parser.parse_args(words)
    chosen_by = next((loss.flag for loss in all_losses() if name in loss.names), "--loss")
    settings = CommandLine([chosen_by, name, *words, *others]).settings
    loss = settings.loss
    loss.check_alone(settings)
    refuse_other_losses_flags(flags, loss)
    return {
        "sidecar": loss.sidecar(settings, settings.lora),
        **loss.reads(settings, settings.lora),
    }


def _words_of(text: str) -> list[str]:
    """Return the name of a loss, and the words behind it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(
            f"--loss {text!r} cannot be divided into words ({error}): close its quotes."
        ) from None
    if not words:
        raise BadInput("--loss names no loss: give a name of --loss or --task of training.")
    return words
