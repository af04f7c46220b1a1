"""The check of a launch script's flags, before any rank is started.

Scripts run it as ``WORLD_SIZE=N python -m mcore_qwen3vl.training.arguments.launch_check FLAGS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import help_words


def _main(words: Sequence[str]) -> int:
    """Check a launch script's flags for ``WORLD_SIZE`` ranks; return the exit code, 0 or 2.

    After ``--dry-run``, only flags that are wrong on every machine are refused. The rest is noted,
    because the run may have its model and data on another machine.
    """
    dry_run = words[:1] == ["--dry-run"]
    command = CommandLine(words[dry_run:])
    if help_words(command.words) is not None:
        return 0
    noted = False
    try:
        command.check_names()
        _ = command.settings  # parses them, and raises BadInput for an invalid value
        noted = dry_run  # what is refused from here on may depend on the machine
        check_early(command)
        command.layout(int(os.environ["WORLD_SIZE"]))
    except BadInput as error:
        what = "note: this would be refused here" if noted else "error"
        print(f"{what}: {visible(str(error))}", file=sys.stderr)
        return 0 if noted else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
