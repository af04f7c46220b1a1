"""The folders that a run writes to, and whose they are."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_qwen3vl.converters.identify import (
    TRACKER,
    PathKind,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import write_at_once
from mcore_qwen3vl.settings.run import CheckpointSettings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.writer_lock import only_writer

LOGS = "logs"
_OWNER = ".run"
"""The file, in a folder of checkpoints or exports, with the id of the run that it belongs to."""


def log_of(command: CommandLine, rank: int) -> Path | None:
    """Return the log file of `rank`; None without ``--save`` or with ``--verbose``."""
    save, verbose = command.settings.checkpoints.save, command.settings.training.verbose
    return log_file(Path(save), rank) if save and not verbose else None


def log_file(save: Path, rank: int) -> Path:
    """Return the file for a rank's output, below the checkpoint directory `save`."""
    return save / LOGS / f"rank_{rank:05d}.txt"


def check_writable(folder: Path) -> None:
    """Raise BadInput if `folder` can neither be written to nor created."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if reason := find_disk_error(there, 4096):
        raise BadInput(
            f"{folder} cannot be written: {reason}. Choose another directory, or make room."
        )


def find_disk_error(folder: Path, size: int) -> str | None:
    """Write `size` bytes to a file that is gone at once, and return the system's error, if any."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def check_overwriting(checkpoints: CheckpointSettings, exports: str | None) -> None:
    """Raise BadInput if the run would write into a checkpoint, or over another run's.

    Only the run that is resumed may be written to, after its newest checkpoint. Paths are compared
    as the file system resolves them.
    """
    targets = {"--save": checkpoints.save, "--save-hf": exports}
    for flag, target in targets.items():
        require_folder(flag, target)
        if target and (place := _checkpoint_around(Path(os.path.realpath(target)))):
            raise BadInput(
                f"{flag} {target} is the checkpoint {place}, or inside it: name another folder "
                f"with {flag}."
            )
    if not (named := checkpoints.save):
        return
    save = Path(os.path.realpath(named))
    if exports and Path(os.path.realpath(exports)) == save:
        raise BadInput(
            f"--save and --save-hf are both {named}, where an export would replace the "
            "checkpoint of the same step: name another folder, for example one below it."
        )
    load = Path(os.path.realpath(checkpoints.load)) if checkpoints.load else save
    start = checkpoints.pretrained_checkpoint
    base = start and Path(os.path.realpath(start))
    if load in save.parents or base in (save, *save.parents):
        raise BadInput(
            f"--save {named} is the folder that the weights are loaded from, or inside it: "
            "name another folder with --save."
        )
    newest = read_tracker(save)
    if newest is None:
        return
    starts_over = {"--load": load != save, "--finetune": checkpoints.finetune}
    if flags := " and ".join(flag for flag, does in starts_over.items() if does):
        raise BadInput(
            f"--save {named} holds a run, up to {folder_name(newest)}, which {flags} would "
            f"overwrite: name another folder with --save, or leave out {flags} to go on with it."
        )
    if (step := checkpoints.ckpt_step) and isinstance(newest, int) and newest > step:
        raise BadInput(
            f"--save {named} holds a run, up to {folder_name(newest)}, which a run from "
            f"--ckpt-step {step} would overwrite: add --load {named}, and name "
            "another folder with --save."
        )


def require_folder(flag: str, target: str | None) -> None:
    """Raise BadInput if what a flag names to write into is there and no folder."""
    if target and os.path.lexists(target) and not os.path.isdir(target):
        raise BadInput(f"{flag} {target} is not a folder: name another one.")


def _checkpoint_around(folder: Path) -> Path | None:
    """Return the Hugging Face checkpoint, adapter or iteration that `folder` is or is inside."""
    for place in (folder, *folder.parents):
        kind = identify(place).kind
        # With a tracker it is a run, perhaps with Hugging Face files beside it.
        is_checkpoint = (
            kind in (PathKind.MEGATRON, PathKind.HUGGINGFACE) and not (place / TRACKER).is_file()
        )
        if is_checkpoint or kind is PathKind.ADAPTER:
            return place
    return None


def check_export(save: str | None, exports: str | None) -> None:
    """Raise BadInput if ``--save-hf`` holds exports of another run than the one in ``--save``."""
    folder = Path(exports or "")
    exported = [folder_name(step) for step in numbered_iterations(folder)] if exports else []
    exported += ["best"] if exports and (folder / "best").exists() else []
    owner = owner_of(exports)
    # Earlier versions named no owner. Then a run that goes on is taken for it.
    goes_on = bool(save and numbered_iterations(Path(save)))
    is_ours = owner == owner_of(save) if owner else goes_on
    if exported and not is_ours:
        raise BadInput(
            f"{exports} holds the export {exported[-1]} of another run, which this one "
            "would overwrite. Name another folder with --save-hf, or remove it."
        )


def owner_of(folder: str | Path | None) -> str | None:
    """Return the id of the run that `folder` belongs to; None if no run has claimed it."""
    file = folder and Path(folder) / _OWNER
    return file.read_text("utf-8", "replace").strip() if file and file.is_file() else None


def claim_folders(save: str | None, exports: str) -> None:
    """Write a run's id into its folder of exports, and into its ``--save`` if it has one."""
    run = owner_of(save) or uuid.uuid4().hex
    for folder in filter(None, (save, exports)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_at_once(Path(folder) / _OWNER, f"{run}\n")


@contextmanager
def lock_folders(folders: Sequence[str | None]) -> Iterator[None]:
    """Lock the `folders` that a run writes to, as one rank does, or raise BadInput."""
    with ExitStack() as locks:
        for folder in {Path(os.path.realpath(place)) for place in folders if place}:
            folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(only_writer(folder))
            for left in folder.glob(".*.[0-9]*.tmp"):  # of `atomic_write`, in a run that was killed
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        yield
