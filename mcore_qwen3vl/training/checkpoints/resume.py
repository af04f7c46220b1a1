"""Which checkpoint a run resumes from, and the model's files beside those that it saves.

A run that was killed while writing, or a full disk, leaves a checkpoint whose files are missing,
short or empty. With thousands of ranks, one of them should find that before Megatron starts
reading. A checkpoint is also more useful with the model's config, tokenizer and processor beside
it.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from filecmp import cmp
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl.config import Architecture, read_config_file, states_vision
from mcore_qwen3vl.converters.formats import format_of
from mcore_qwen3vl.converters.hf.companions import copy_companions, write_form
from mcore_qwen3vl.converters.hf.config_file import Changes, dtype_to_state
from mcore_qwen3vl.converters.hf.shards import TensorSpec
from mcore_qwen3vl.converters.identify import (
    CHECKPOINT_CONFIG,
    DEFAULT_FORMAT,
    HF_FOLDER,
    RELEASE,
    TRACKER,
    PathKind,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
    refuse_special_parts,
)
from mcore_qwen3vl.converters.mapping.dialects import HYBRID_NORM, LANGUAGE, dialect_of
from mcore_qwen3vl.converters.mapping.forms import Form, head_of, names_in_transformers
from mcore_qwen3vl.converters.mapping.table import EMBEDDING
from mcore_qwen3vl.converters.megatron_checkpoint import FileRange
from mcore_qwen3vl.converters.storage.archive import torch_refusal_error
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.data.processor import configs_with_budgets
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write, read_object, write_at_once
from mcore_qwen3vl.settings.run import CheckpointSettings
from mcore_qwen3vl.training.arguments.settings import Settings

# Megatron names a weight, or "optimizer.state.exp_avg.NAME from model not in state dict: [...]".
_UNSAVED_PARAMETER = re.compile(
    r"(?P<state>optimizer\.state\.\w+\.)?(?P<name>\S+\.(?:weight|bias))"
    r"(?: from model not in state dict|$)"
)

log = logging.getLogger(__name__)

_GO_ON_WITHOUT = {
    "optimizer": "--no-load-optim",
    "opt_param_scheduler": "--no-load-optim",
    "rng_state": "--no-load-rng",
}
"""The flag that goes on without a state which a checkpoint lacks, by Megatron's name of it."""
_ZIP = b"PK\x03\x04"  # every stored tensor starts with a zip's first bytes


def latest_iteration(directory: str | Path) -> int | None:
    """Return the tracker file's iteration; None if there is no file or it says `release`."""
    newest = read_tracker(Path(directory))
    return newest if isinstance(newest, int) else None


def readable_iteration(directory: str | Path, *, fallback: bool) -> int | None:
    """Return the newest complete iteration, not beyond the tracker's; None if that names none.

    It raises BadInput if all are damaged, or the latest is and `fallback` to older ones is off.
    """
    latest = latest_iteration(directory)
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


@dataclass(frozen=True)
class OtherMaker:
    """A checkpoint of another maker: its iteration's folder, and the maker for messages."""

    folder: Path
    maker: str


def checkpoint_of_other_maker(checkpoints: CheckpointSettings) -> OtherMaker | None:
    """Return the checkpoint that a run starts from if another maker wrote it, whose keys differ.

    Megatron cannot load it; `load_checkpoint` of `converters.live` can.

    Raises:
        BadInput: the run would resume it rather than take its weights, or save beside it; or an
            unknown maker wrote it.
    """
    load = checkpoints.load or checkpoints.save  # the default of --load
    sources = [source for source in (load, checkpoints.pretrained_checkpoint) if source]
    source = next((s for s in sources if identify(s).kind is PathKind.MEGATRON), None)
    if source is None:
        return None
    step = checkpoints.ckpt_step if source == load else None
    place = identify(source if step is None else Path(source) / folder_name(step))
    try:
        folder = place.weights()
        if format_of(place).plan is not None or not _may_be_other_makers(folder):
            return None
        index = read_metadata(folder)
    except BadInput:
        return None  # `choose_iteration` says what is wrong with it
    dialect = dialect_of(folder, index.tensors)
    if dialect is None:
        return None
    if checkpoints.save and os.path.realpath(checkpoints.save) == os.path.realpath(source):
        raise BadInput(
            f"{source} holds checkpoints of {dialect.maker}: choose another directory to --save to."
        )
    saved = any(key.startswith(("optimizer", "chained_")) for key in index.tensors)
    if saved and source == load and not checkpoints.finetune:
        raise BadInput(
            f"{folder} was written by {dialect.maker}, whose optimizer state cannot be resumed "
            "here. Add --finetune to start from its weights."
        )
    return OtherMaker(folder, dialect.maker)


def _may_be_other_makers(folder: Path) -> bool:
    """Return whether the metadata names a tensor as other makers do, without parsing it."""
    # The metadata of a large run takes seconds to parse, and every rank asks.
    file = folder / METADATA
    content = file.read_bytes() if file.is_file() else b""
    return any(key.encode() in content for key in (LANGUAGE + EMBEDDING, HYBRID_NORM))


def choose_iteration(
    checkpoints: CheckpointSettings, args: argparse.Namespace, *, fallback: bool
) -> int | None:
    """Return the step to load in place of the latest of ``--load``, if that cannot be read.

    All ranks call this. `args` are Megatron's, for formats that load only into an equal run.

    Raises:
        BadInput: see :func:`readable_iteration` and
            :class:`mcore_qwen3vl.converters.formats.CheckpointFormat`.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            if checkpoints.load is not None:
                _write_empty_tracker_again(Path(checkpoints.load))
                answer = [iteration_to_load(checkpoints, args, fallback=fallback)]
            _require_sound_start(checkpoints)
        except BadInput as flaw:
            answer = [flaw]
    dist.broadcast_object_list(answer, src=0)
    iteration: int | BadInput | None = answer[0]
    if isinstance(iteration, BadInput):
        raise iteration
    if iteration is None or iteration == latest_iteration(checkpoints.load or ""):
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


def iteration_to_load(
    checkpoints: CheckpointSettings, args: argparse.Namespace, *, fallback: bool
) -> int | None:
    """Check what Megatron will read; return the iteration, or None to leave the choice to it."""
    load, named = Path(checkpoints.load or ""), checkpoints.ckpt_step
    newest = read_tracker(load) if named is None else named
    if newest is None:
        return None
    folder = load / folder_name(newest)
    refuse_special_parts(folder)
    if (format := format_of(identify(folder))).plan is not None:
        format.check_run(folder, args)
    elif checkpoints.ckpt_format == "torch_dist" and named is None:
        return readable_iteration(load, fallback=fallback)
    elif (
        checkpoints.ckpt_format == "torch_dist"
        and folder.is_dir()
        and (reason := find_damage(folder))
    ):
        raise BadInput(f"--ckpt-step {named} cannot be read: {reason.rstrip('.')}.")
    return None


def step_to_load(checkpoints: CheckpointSettings, *, fallback: bool = False) -> int | None:
    """Return the step of the checkpoint from which a run goes on; None if none does.

    With `fallback` it is an older one than the tracker names, if only that can be read.
    """
    if not checkpoints.load or checkpoints.finetune:
        return None
    if fallback and not checkpoints.ckpt_step and checkpoints.ckpt_format == DEFAULT_FORMAT:
        with suppress(BadInput):  # `choose_iteration` says what is wrong with all of them
            return readable_iteration(checkpoints.load, fallback=True)
    return checkpoints.ckpt_step or latest_iteration(checkpoints.load)


def check_companions(directory: str | Path, architecture: Architecture) -> None:
    """Raise BadInput if the ``hf`` folder of `directory` describes another model."""
    folder = Path(directory) / HF_FOLDER
    if not folder.exists():
        return
    there = Architecture.from_hf(folder)
    free = ("dtype", "expert_layout", "initializer_range", "router_aux_loss_coef")
    if replace(there, **{name: getattr(architecture, name) for name in free}) != architecture:
        raise BadInput(
            f"{folder} describes another model than --hf-model: choose another directory to --save "
            "to, or remove it."
        )


def save_companions(settings: Settings) -> None:
    """Copy the files of ``--hf-model`` other than weights into the ``hf`` folder of ``--save``.

    A conversion does the same. With them, the checkpoints can be exported, compared and used for
    generation as they are; :func:`changed_files` says what differs. One rank calls this; the folder
    appears whole or not at all. One with other files, such as those of another model or half of
    these, is moved away first.
    """
    assert settings.checkpoints.save is not None
    folder, source = Path(settings.checkpoints.save) / HF_FOLDER, settings.model.folder
    with atomic_write(folder, remedy=None) as partial:
        labels, files = settings.labels, changed_files(settings)
        dtype = None
        if not settings.lora.trains_adapter:
            held = TensorSpec(getattr(torch, settings.compute.params_dtype), (1,))
            dtype = dtype_to_state(read_config_file(source), [held])
        copy_companions(source, partial, Changes(dtype=dtype, labels=labels, files=files))
        names = names_in_transformers(has_vision=states_vision(source))
        write_form(partial, Form(names, head_of(labels)))
        if folder.exists():
            _move_away(folder, partial)


def _move_away(folder: Path, wanted: Path) -> None:
    """Remove `folder`, whose place `wanted` takes; keep it under another name if it differs."""
    there, new = (
        {f.relative_to(d): f for f in d.rglob("*") if f.is_file()} for d in (folder, wanted)
    )
    if there.keys() == new.keys() and all(cmp(there[n], new[n], shallow=False) for n in new):
        shutil.rmtree(folder)
        return
    numbers = (folder.with_name(f"{folder.name}.replaced-{number}") for number in count(1))
    aside = next(place for place in numbers if not os.path.lexists(place))
    folder.rename(aside)
    log.warning(
        "%s held other files than this run's --hf-model: they are in %s now", folder, aside.name
    )


def changed_files(settings: Settings) -> dict[str, bytes]:
    """Return what a run writes otherwise than ``--hf-model`` has it, by file name."""
    # Imports megatron, and this module is imported before the CPU's backend is there.
    from mcore_qwen3vl.generation.sampling import config_with_turn_end

    source = settings.model.folder
    # A model that is trained on turns stops at their end.
    stopping = {} if settings.loss.flag == "--task" else config_with_turn_end(source)
    return {**configs_with_budgets(source, settings.data.media_limits), **stopping}


@contextmanager
def explain_load_errors(checkpoints: CheckpointSettings) -> Iterator[None]:
    """Explain Megatron's errors about a checkpoint that does not fit the command line.

    Raises:
        BadInput: the optimizer, its schedule, the RNG or a parameter was not saved, or torch
            refuses to unpickle a file, or Megatron cannot load what is there.
    """
    directory = checkpoints.load or checkpoints.pretrained_checkpoint or ""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        failures: list[BaseException] = [error]
        if isinstance(error, CheckpointException):  # wraps each rank's error
            failures = [failure[0] for failure in error.failures.values()]
        for failure in failures:
            if isinstance(failure, BadInput):  # by a guard of ours
                raise failure from None
            if isinstance(failure, pickle.UnpicklingError):
                raise torch_refusal_error(f"The checkpoint in {directory}", failure) from None
            if lacks := _explain_missing_parameter(directory, failure):
                raise lacks from None
        # torch's exception is no Exception, so that nothing else would put it into words.
        raise _unloadable(directory, failures[0]) from error
    except KeyError as error:
        if lacks := _explain_missing_parameter(directory, error):
            raise lacks from None
        if (flag := _GO_ON_WITHOUT.get(error.args[0])) is None:
            raise _unloadable(directory, error) from error
        raise BadInput(
            f"The checkpoint in {directory} was saved without {error}. Add {flag} to go on "
            "without, or --finetune to take its weights only."
        ) from error
    except (BadInput, OSError, MemoryError, torch.OutOfMemoryError, dist.DistError):
        raise  # each says what it is about
    except Exception as error:  # Megatron trusts the content, and raises whatever comes of it
        raise _unloadable(directory, error) from error


def _unloadable(directory: str, error: BaseException) -> BadInput:
    """Return the error that Megatron cannot load a checkpoint; the traceback goes to the log."""
    log.info("loading from %s failed", directory, exc_info=error)
    reason = next(iter(str(error).strip().splitlines()), "")
    return BadInput(
        f"The checkpoint in {directory} cannot be loaded: {type(error).__name__}"
        f"{': ' * bool(reason)}{reason.rstrip('.'):.300}. It is damaged, or was saved by another "
        "program or with other flags: copy it again, check the path, or give that run's flags."
    )


def _explain_missing_parameter(directory: str, error: BaseException) -> BadInput | None:
    """Explain that a parameter was not saved; None if that is not what `error` says."""
    match = _UNSAVED_PARAMETER.match(str(error.args[0])) if isinstance(error, KeyError) else None
    if match is None:
        return None
    remedies = "Give that run's flags; "
    if match["state"]:  # the weights are there
        remedies += "or add --no-load-optim, to go on with a new optimizer; "
    return BadInput(
        f"The checkpoint in {directory} holds no {match['state'] or ''}{match['name']}, which this "
        "command trains: it was saved by a run that trained other parts (--freeze, --trainable, "
        f"--mtp-num-layers) or another task (--task). {remedies}or take its weights only, with "
        f"--load {directory} --finetune and another --save."
    )


def find_damage(folder: Path) -> str | None:
    """Return why a torch_dist checkpoint cannot be read, or None. Reads headers, not tensors."""
    marker = folder / CHECKPOINT_CONFIG
    if not marker.exists() or marker.stat().st_size == 0:
        return f"{marker} is missing or empty"
    try:
        backend = read_object(marker, marker.name, "").get("sharded_backend")
        if backend != DEFAULT_FORMAT:
            return f"{marker} names the format {backend!r:.40} instead of {DEFAULT_FORMAT}"
        index = read_metadata(folder)
    except BadInput as error:
        return str(error)
    chunks = [chunk.data for tensor in index.tensors.values() for chunk in tensor.chunks]
    by_file: dict[str, list[FileRange]] = {}
    for data in [*chunks, *index.objects.values()]:
        by_file.setdefault(data.file, []).append(data)
    reasons = (_find_damage_in_file(folder / name, ranges) for name, ranges in by_file.items())
    return next((reason for reason in reasons if reason), None)


def _find_damage_in_file(file: Path, ranges: list[FileRange]) -> str | None:
    """Return why a file lacks one of the stored tensors or objects at `ranges`, or None."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:  # such as a name that is too long
        return f"{file} cannot be read: {error.strerror}"
    needed = max(data.offset + data.length for data in ranges)
    if size < needed:
        return f"{file} has {size} bytes of {needed}"
    with file.open("rb") as stream:
        for data in ranges:
            stream.seek(data.offset)
            if stream.read(len(_ZIP)) != _ZIP:
                return f"{file} holds no tensor at byte {data.offset}"
    return None
