"""An error message for a disk that fails during a save: why, what is left and how to go on."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl.converters.mcore.paths import folder_name, tracked
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.broadcast import data_state

_OF_DISKS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EACCES", "EPERM", "ESTALE")
    if hasattr(errno, name)
)
_PROBE = 2**20  # bytes


@contextmanager
def explained_save(directory: str, iteration: int) -> Iterator[None]:
    """Explain a disk's failure while a checkpoint is saved; every rank saves inside this.

    The partial checkpoint is removed, as far as possible, to free its space.

    Raises:
        BadInput: the disk made the save fail. Other errors pass through.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        save = Path(directory)
        reason = _reason(error)
        if isinstance(error, CheckpointException):  # raised on every rank
            reason = _first_of_any(reason or _probe(save))
        if reason is None:
            raise
        whole = tracked(save)
        if dist.get_rank() == 0 and whole != iteration:
            for part in (save / folder_name(iteration), data_state.folder_of(save, iteration)):
                shutil.rmtree(part, ignore_errors=True)
        left = (
            "There is no earlier checkpoint"
            if whole is None
            else f"The checkpoint of step {whole} is whole"
        )
        raise BadInput(
            f"Step {iteration} could not be saved to {directory}: {reason}. {left}. Make room, "
            "or move the directory to another disk and name it with --save. The same command "
            f"then continues {'from the beginning' if whole is None else 'from there'}."
        ) from error


def _reason(error: BaseException | None) -> str | None:
    """Return the system's message if `error`, or an error that caused it, came from the disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None


def _first_of_any(reason: str | None) -> str | None:
    """Return some rank's reason; gathered before any rank frees space by removing files."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, reason)
    return next(filter(None, everyone), None)


def _probe(folder: Path) -> str | None:
    """Write a megabyte and return the system's error, which Megatron's writers do not pass on."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None
