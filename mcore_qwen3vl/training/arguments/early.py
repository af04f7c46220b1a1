"""Quick checks of a command line, which need no torch, no megatron and no ranks.

``mcore-qwen3vl train`` runs them before it starts ranks, launch scripts run them with
``python -m`` of this module, and every rank runs them before it imports megatron, which takes
seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.hf.companions import require_processor
from mcore_qwen3vl.converters.hf.hub import SMALL
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links_out
from mcore_qwen3vl.training.arguments.checks import check_surroundings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import asked_words
from mcore_qwen3vl.training.arguments.layout import check_layout
from mcore_qwen3vl.training.folders import check_export, check_writable
from mcore_qwen3vl.training.lora.flags import check_targets


def check_early(command: CommandLine) -> None:
    """Refuse a command line with which no run can start.

    Raises:
        BadInput: a flag is unknown or missing or has an invalid value; or the model, the data or
            the folder to save to cannot be used.
    """
    args = command.checked_args()
    check_surroundings(args)
    model = command.model
    require_processor(model)
    check_targets(args, command.architecture)
    targets = [Path(folder) for folder in (args.save, args.save_hf) if folder]
    if targets and os.environ.get("RANK", "0") == "0":
        for folder in targets:
            check_writable(folder)
        check_export(args)
        refuse_links_out((file for glob in SMALL for file in model.glob(glob)), model)


def _main(words: Sequence[str]) -> int:
    """Check a launch script's flags for ``WORLD_SIZE`` ranks; return the exit code, 0 or 2.

    After ``--dry-run``, only flags that are wrong on every machine are refused. The rest is noted,
    because the run may have its model and data on another machine.
    """
    dry_run = words[:1] == ["--dry-run"]
    command = CommandLine(words[dry_run:])
    if asked_words(command.words) is not None:
        return 0
    checked = False
    try:
        command.checked_args()
        checked = True
        check_early(command)
        check_layout(command.args, command.architecture, int(os.environ["WORLD_SIZE"]))
    except BadInput as error:
        noted = dry_run and checked
        what = "note: this would be refused here" if noted else "error"
        print(f"{what}: {visible(str(error))}", file=sys.stderr)
        return 0 if noted else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
