"""The folders that a run writes to, and whose they are."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_qwen3vl.converters.place import (
    TRACKER,
    Kind,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import only_writer
from mcore_qwen3vl.training.arguments.command_line import CommandLine

LOGS = "logs"
_OWNER = ".run"
"""The file, in a folder of checkpoints or exports, with the id of the run that it belongs to."""


def log_of(command: CommandLine, rank: int) -> Path | None:
    """Return the log file of `rank`; None without ``--save`` or with ``--verbose``."""
    args = command.args
    return log_file(Path(args.save), rank) if args.save and not args.verbose else None


def log_file(save: Path, rank: int) -> Path:
    """Return the file for a rank's output, below the checkpoint directory `save`."""
    return save / LOGS / f"rank_{rank:05d}.txt"


def check_writable(folder: Path) -> None:
    """Raise BadInput if `folder` can neither be written to nor created."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if reason := disk_error(there, 4096):
        raise BadInput(
            f"{folder} cannot be written: {reason}. Choose another directory, or make room."
        )


def disk_error(folder: Path, size: int) -> str | None:
    """Write `size` bytes to a file that is gone at once, and return the system's error, if any."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def check_overwriting(args: argparse.Namespace) -> None:
    """Raise BadInput if the run would write into a checkpoint, or over another run's.

    Only the run that is resumed may be written to, after its newest checkpoint. Paths are compared
    as the file system resolves them.
    """
    targets = {"--save": args.save, "--save-hf": args.save_hf}
    for flag, target in targets.items():
        if target and (place := _checkpoint_around(Path(target).resolve())):
            raise BadInput(
                f"{flag} {target} is the checkpoint {place}, or inside it: name another folder "
                f"with {flag}."
            )
    if not args.save:
        return
    save = Path(args.save).resolve()
    if args.save_hf and Path(args.save_hf).resolve() == save:
        raise BadInput(
            f"--save and --save-hf are both {args.save}, where an export would replace the "
            "checkpoint of the same step: name another folder, for example one below it."
        )
    load = Path(args.load).resolve() if args.load else save
    base = args.pretrained_checkpoint and Path(args.pretrained_checkpoint).resolve()
    if load in save.parents or base in (save, *save.parents):
        raise BadInput(
            f"--save {args.save} is the folder that the weights are loaded from, or inside it: "
            "name another folder with --save."
        )
    newest = read_tracker(save)
    if newest is None:
        return
    starts_over = {"--load": load != save, "--finetune": args.finetune}
    if flags := " and ".join(flag for flag, does in starts_over.items() if does):
        raise BadInput(
            f"--save {args.save} holds a run, up to {folder_name(newest)}, which {flags} would "
            f"overwrite: name another folder with --save, or leave out {flags} to go on with it."
        )
    if args.ckpt_step and isinstance(newest, int) and newest > args.ckpt_step:
        raise BadInput(
            f"--save {args.save} holds a run, up to {folder_name(newest)}, which a run from "
            f"--ckpt-step {args.ckpt_step} would overwrite: add --load {args.save}, and name "
            "another folder with --save."
        )


def _checkpoint_around(folder: Path) -> Path | None:
    """Return the Hugging Face checkpoint, adapter or iteration that `folder` is or is inside."""
    for place in (folder, *folder.parents):
        kind = identify(place).kind
        # With a tracker it is a run, perhaps with Hugging Face files beside it.
        whole = kind in (Kind.MEGATRON, Kind.HUGGINGFACE) and not (place / TRACKER).is_file()
        if whole or kind is Kind.ADAPTER:
            return place
    return None


def check_export(args: argparse.Namespace) -> None:
    """Raise BadInput if ``--save-hf`` holds exports of another run than the one in ``--save``."""
    folder = Path(args.save_hf or "")
    found = [folder_name(step) for step in numbered_iterations(folder)] if args.save_hf else []
    found += ["best"] if args.save_hf and (folder / "best").exists() else []
    owner = owner_of(args.save_hf)
    # Earlier versions named no owner. Then a run that goes on is taken for it.
    goes_on = bool(args.save and numbered_iterations(Path(args.save)))
    own = owner == owner_of(args.save) if owner else goes_on
    if found and not own:
        raise BadInput(
            f"{args.save_hf} holds the export {found[-1]} of another run, which this one "
            "would overwrite. Name another folder with --save-hf, or remove it."
        )


def owner_of(folder: str | Path | None) -> str | None:
    """Return the id of the run that `folder` belongs to; None if no run has claimed it."""
    file = folder and Path(folder) / _OWNER
    return file.read_text("utf-8").strip() if file and file.is_file() else None


def claim(save: str | None, exports: str) -> None:
    """Write a run's id into its folder of exports, and into its ``--save`` if it has one."""
    run = owner_of(save) or uuid.uuid4().hex
    for folder in filter(None, (save, exports)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / _OWNER).write_text(f"{run}\n", "utf-8")


@contextmanager
def locked(args: argparse.Namespace) -> Iterator[None]:
    """Lock, on the first rank, the folders that a run writes to, or raise BadInput."""
    with ExitStack() as locks:
        places = (args.save, args.save_hf) if args.rank == 0 else ()
        for folder in {Path(place).resolve() for place in places if place}:
            folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(only_writer(folder))
            for left in folder.glob(".*.[0-9]*.tmp"):  # of `atomic_write`, in a run that was killed
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        yield
