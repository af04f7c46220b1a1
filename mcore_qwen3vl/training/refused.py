"""A run that is refused before its first step leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.logs.quiet import log_of


@contextmanager
def nothing_left(command: CommandLine, begun: Callable[[], bool]) -> Iterator[None]:
    """If the body refuses the run, remove the files and folders that this rank has made.

    Megatron needs its log and TensorBoard's folder before the last checks. Only this rank's own
    files go, and then folders that are empty, so that another run in the same place loses nothing.

    Args:
        command: the command line, which names the folders.
        begun: whether the run has begun to train. Then everything is kept.
    """
    args = command.args
    log = log_of(command, int(os.environ.get("RANK", "0")))
    own_log = log if log is not None and not log.exists() else None
    named = (log and log.parent, args.save, args.save_hf, args.tensorboard_dir)
    folders = [Path(folder) for folder in named if folder]
    made = [
        place for folder in folders for place in (folder, *folder.parents) if not place.exists()
    ]
    try:
        yield
    except BadInput:
        if not begun():
            _remove(own_log, args.tensorboard_dir, made)
        raise


def _remove(log: Path | None, tensorboard: str | None, folders: list[Path]) -> None:
    """Remove this process's files, then those of `folders`, inner ones first, that are empty."""
    events = f"events.out.tfevents.*.{os.getpid()}.*"
    for file in [*([log] if log else []), *(Path(tensorboard).glob(events) if tensorboard else [])]:
        file.unlink(missing_ok=True)
    for folder in sorted(folders, key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):
            folder.rmdir()
