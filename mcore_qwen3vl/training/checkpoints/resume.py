"""Which checkpoint a run resumes from."""

from __future__ import annotations

import argparse
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_qwen3vl.converters.formats import format_of
from mcore_qwen3vl.converters.identify import (
    DEFAULT_FORMAT,
    RELEASE,
    TRACKER,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
    refuse_special_parts,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import write_at_once
from mcore_qwen3vl.settings.run import CheckpointSettings
from mcore_qwen3vl.training.checkpoints.damage import find_damage

log = logging.getLogger(__name__)


def tracked_iteration(directory: str | Path) -> int | None:
    """Return the tracker file's iteration; None if there is no file or it says `release`."""
    newest = read_tracker(Path(directory))
    return newest if isinstance(newest, int) else None


def newest_readable_iteration(directory: str | Path, *, fallback: bool) -> int | None:
    """Return the newest complete iteration, not beyond the tracker's; None if that names none.

    It raises BadInput if all are damaged, or the latest is and `fallback` to older ones is off.
    """
    latest = tracked_iteration(directory)
    if latest is None:
        return None
    older = [n for n in numbered_iterations(Path(directory)) if n < latest]
    reasons = []
    for iteration in (latest, *reversed(older)):
        reason = find_damage(Path(directory) / folder_name(iteration))
        if reason is None:
            return iteration
        reasons.append(f"iteration {iteration}: {reason.rstrip('.')}")
        if not fallback:
            break
    remedy = (
        "Start from the beginning, or from another directory."
        if fallback
        else "Resume from the one before it with --on-corrupt-checkpoint fallback."
    )
    raise BadInput(f"No usable checkpoint in {directory}: {'; '.join(reasons)}. {remedy}")


def agree_on_older_iteration(
    checkpoints: CheckpointSettings, args: argparse.Namespace, *, fallback: bool
) -> int | None:
    """Return the step to load in place of the latest of ``--load``, if that cannot be read.

    All ranks call this. `args` are Megatron's, for formats that load only into an equal run.

    Raises:
        BadInput: see :func:`newest_readable_iteration` and
            :class:`mcore_qwen3vl.converters.formats.CheckpointFormat`.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            if checkpoints.load is not None:
                _write_empty_tracker_again(Path(checkpoints.load))
                answer = [checked_iteration(checkpoints, args, fallback=fallback)]
            _require_sound_start(checkpoints)
        except BadInput as flaw:
            answer = [flaw]
    dist.broadcast_object_list(answer, src=0)
    iteration: int | BadInput | None = answer[0]
    if isinstance(iteration, BadInput):
        raise iteration
    if iteration is None or iteration == tracked_iteration(checkpoints.load or ""):
        return None
    if dist.get_rank() == 0:
        log.warning("the latest checkpoint is damaged; resuming from iteration %s", iteration)
    return iteration


def _require_sound_start(checkpoints: CheckpointSettings) -> None:
    """Raise BadInput if the weights that a new run begins from are damaged.

    Megatron would take memory for whatever sizes they state.
    """
    load = checkpoints.load
    newest = read_tracker(Path(load)) if load else None
    start = load if newest == RELEASE else checkpoints.pretrained_checkpoint
    if isinstance(newest, int) or checkpoints.ckpt_step is not None or not start:
        return
    place = identify(start)
    if place.format == DEFAULT_FORMAT and (reason := find_damage(place.folder)):
        raise BadInput(f"{start} cannot be read: {reason.rstrip('.')}.")


def _write_empty_tracker_again(load: Path) -> None:
    """Write what an empty tracker stands for, at which Megatron would exit without a word."""
    newest = read_tracker(load)
    if newest is not None and not (load / TRACKER).read_text("ascii").strip():
        write_at_once(load / TRACKER, str(newest), f"It is empty: write {newest} into it.")


def checked_iteration(
    checkpoints: CheckpointSettings, args: argparse.Namespace, *, fallback: bool
) -> int | None:
    """Check what Megatron will read; return the iteration, or None to leave the choice to it."""
    load, named = Path(checkpoints.load or ""), checkpoints.ckpt_step
    newest = read_tracker(load) if named is None else named
    if newest is None:
        return None
    folder = load / folder_name(newest)
    refuse_special_parts(folder)
    if (format := format_of(identify(folder))).one_layout:
        format.check_run(folder, args)
    elif checkpoints.ckpt_format == "torch_dist" and named is None:
        return newest_readable_iteration(load, fallback=fallback)
    elif (
        checkpoints.ckpt_format == "torch_dist"
        and folder.is_dir()
        and (reason := find_damage(folder))
    ):
        raise BadInput(f"--ckpt-step {named} cannot be read: {reason.rstrip('.')}.")
    return None


def resumed_step(checkpoints: CheckpointSettings, *, fallback: bool = False) -> int | None:
    """Return the step of the checkpoint from which a run goes on; None if none does.

    With `fallback` it is an older one than the tracker names, if only that can be read.
    """
    if not checkpoints.load or checkpoints.finetune:
        return None
    if fallback and not checkpoints.ckpt_step and checkpoints.ckpt_format == DEFAULT_FORMAT:
        with suppress(BadInput):  # `agree_on_older_iteration` says what is wrong with all of them
            return newest_readable_iteration(checkpoints.load, fallback=True)
    return checkpoints.ckpt_step or tracked_iteration(checkpoints.load)
