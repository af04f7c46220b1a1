"""The checkpoints and exports of a run: what Megatron's loop loads and saves, and when."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training import training
from megatron.training.utils import print_rank_0
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl import model_card
from mcore_qwen3vl.converters.export import save_hf
from mcore_qwen3vl.converters.identify import (
    folder_name,
    number_of,
    numbered_iterations,
    read_tracker,
)
from mcore_qwen3vl.converters.mapping.forms import head_of
from mcore_qwen3vl.converters.storage.staging import discard_remains, targets_of_remains
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.checkpoints import companions, data_state, resume
from mcore_qwen3vl.training.checkpoints.load_errors import explain_load_errors
from mcore_qwen3vl.training.checkpoints.other_maker import OtherMaker
from mcore_qwen3vl.training.checkpoints.removal import remove_checkpoint
from mcore_qwen3vl.training.checkpoints.validations import Validations
from mcore_qwen3vl.training.contract.resuming import Contract
from mcore_qwen3vl.training.data_provider import DataProvider
from mcore_qwen3vl.training.folders import claim_folders, find_disk_error
from mcore_qwen3vl.training.hooks import NormCheck
from mcore_qwen3vl.training.logs.metrics import Metrics
from mcore_qwen3vl.training.logs.terminal import RunProgress
from mcore_qwen3vl.training.lora import LoraRun, check_checkpoint
from mcore_qwen3vl.training.optimizer_state import check_state_of_weights

_OF_DISKS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EACCES", "EPERM", "ESTALE")
    if hasattr(errno, name)
)
BEST = "best"
_PROBE = 2**20  # bytes to write for the error, which Megatron's writers do not pass on


class CheckpointedRun(Protocol):
    """What checkpoints take of a run; :class:`.run.Run` is one, and its module imports this one."""

    settings: Settings
    args: argparse.Namespace
    contract: Contract
    data: DataProvider
    lora: LoraRun | None
    metrics: Metrics
    norms: NormCheck
    other: OtherMaker | None
    progress: RunProgress


class RunCheckpoints:
    """Wrappers of the functions with which Megatron's loop loads and saves."""

    def __init__(self, run: CheckpointedRun) -> None:
        self._run = run
        self._settings = run.settings
        self._save, self._exports_to = run.settings.checkpoints.save, run.settings.model.save_hf
        self.validations = Validations(run.settings)
        self._trained: tuple[Any, Any] = ([], None)  # the model and its optimizer
        self._quotes = [model_card.quote(file) for file in run.settings.model.certificate]
        self._has_companions = False
        self._on_disk: tuple[str, int] | None = None  # the folder and step of the last checkpoint

    def load(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the newest checkpoint that can be read, and export it if nothing is left to do."""
        megatron, checkpoints = self._run.args, self._settings.checkpoints
        check_checkpoint(checkpoints.load, self._run.lora)
        if self._run.other:  # the provider has read it
            self._run.contract.check(None)
            self._clear_exports(0)
            return 0, 0
        fallback = self._settings.training.on_corrupt_checkpoint == "fallback"
        readable = resume.agree_on_older_iteration(checkpoints, megatron, fallback=fallback)
        if readable is not None:
            megatron.ckpt_step = readable  # the step that Megatron loads
            checkpoints = replace(checkpoints, ckpt_step=readable)
        self._run.contract.check(resume.resumed_step(checkpoints))
        optimizer, scheduler = _optimizer_and_scheduler(*args, **kwargs)
        if scheduler is not None and not scheduler.use_checkpoint_opt_param_scheduler:
            scheduler.override_opt_param_scheduler = True  # the contract compares the schedules
        with explain_load_errors(checkpoints):
            result = original(model, *args, **kwargs)
        step, folder = result[0], checkpoints.load or ""
        if not step:
            self._clear_exports(0)
            return result
        if scheduler is not None:
            self._set_rates(scheduler, Path(folder) / folder_name(step))
        self._trained = model, optimizer
        if optimizer is not None:
            check_state_of_weights(optimizer, folder)
        self._on_disk = folder, step
        otherwise = self._run.contract.validates_otherwise()
        if self.validations.read_losses(step, comparable=not otherwise):
            self._run.progress.say(
                f"validations up to step {step} had other data or settings: the best step and the "
                "patience are counted from here on, and the best checkpoint so far stays"
            )
        if self.validations.is_exhausted:
            megatron.train_iters = step  # where Megatron's loop ends
        self._run.progress.say(f"resuming after step {step} of {folder}")
        self._clear_exports(step)
        # An earlier run was stopped between the two, or somebody has removed the export.
        if self._is_export_due(step) and self._is_missing(self._export_folder(step)):
            self._export(model, optimizer, step, self._export_folder(step))
        self._export_if_best(model, optimizer, step)
        return result

    def report_differences(self, original: Any, saved: argparse.Namespace, **kwargs: Any) -> None:
        """Compare what only the arguments say, in checkpoints of earlier versions."""
        original(saved, **kwargs)
        self._run.contract.check_arguments(saved)

    def _set_rates(self, scheduler: Any, checkpoint: Path) -> None:
        """Complete what Megatron sets of a resumed run's schedule of rates; all ranks call this."""
        if self._run.args.no_load_optim:  # it would begin anew with the optimizer's state
            scheduler.num_steps = self._saved_place_of_rates(checkpoint)
        if scheduler.use_checkpoint_opt_param_scheduler:
            # Megatron keeps all of it but this, and sets the weight decay after it has used it.
            wsd = self._run.contract.saved_value("schedule", "wsd")
            scheduler.wsd_decay_steps = wsd or scheduler.wsd_decay_steps
        scheduler.step(0)

    def _saved_place_of_rates(self, checkpoint: Path) -> int:
        """Return how many samples a checkpoint's schedule of rates has counted.

        Steps that were skipped do not count. A checkpoint without an optimizer has no schedule.
        """
        args = self._run.args
        place = [args.consumed_train_samples - args.skipped_train_samples]
        if dist.get_rank() == 0 and (checkpoint / METADATA).is_file():
            schedule = TorchDistCheckpoint(checkpoint).common_state().get("opt_param_scheduler")
            place = [schedule["num_steps"]] if schedule else place
        dist.broadcast_object_list(place, src=0)
        return place[0]

    def save(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, and with it the position in the data."""
        # Already saved: the run had nothing left to do, or its last step was its best.
        if (self._save, iteration) == self._on_disk:
            return
        folder = self._save
        assert folder is not None
        self._run.norms.settle()  # raises for a step that must not be saved
        with self._run.metrics.pause(), explain_save_errors(folder, iteration):
            if dist.get_rank() == 0:
                # A killed run may have left files here, even of more ranks.
                remove_checkpoint(folder, iteration)
                if not self._has_companions:  # the same for all saves of a run
                    companions.save_companions(self._settings)
                    self._has_companions = True
            dist.barrier()
            if self._run.lora:
                self._run.lora.save_config(folder)
            self._run.data.save_state(folder, iteration)
            self._run.contract.write(iteration)
            original(iteration, *args, **kwargs)
            if self._settings.checkpoints.save_retain_interval and dist.get_rank() == 0:
                data_state.remove_orphans(folder, iteration)
        self._on_disk = folder, iteration
        self._run.progress.say(f"step {iteration}: saved to {folder}")

    def record_validation(self, iteration: int, losses: Mapping[str, Any]) -> None:
        """Record a validation's losses; a collective."""
        self.validations.add(iteration, losses)
        # The last validation follows the last save.
        if self._on_disk == (self._save, iteration):
            self.validations.keep_if_best(iteration)
            self._export_if_best(*self._trained, iteration)

    def after_iteration(
        self, original: Any, model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any
    ) -> bool:
        """Save and export what is due after an iteration; return whether the run ends."""
        with self.validations.forcing_save_and_exit(iteration):
            leaving: bool = original(model, optimizer, scheduler, iteration, *rest)
        self.validations.keep_if_best(iteration)
        self._trained = model, optimizer
        if self._is_export_due(iteration):
            self._export(model, optimizer, iteration, self._export_folder(iteration))
        self._export_if_best(model, optimizer, iteration)
        return leaving

    def _is_export_due(self, iteration: int) -> bool:
        """Return whether ``--save-hf`` has this step."""
        interval = self._settings.model.save_hf_interval
        last = iteration == self._run.args.train_iters or self.validations.is_exhausted
        due = last or (interval and iteration % interval == 0)
        return bool(self._exports_to and due)

    def _is_missing(self, folder: Path) -> bool:
        """Return whether the first rank finds no `folder`; a collective."""
        lacks = [not folder.exists()]
        dist.broadcast_object_list(lacks)
        return lacks[0]

    def _export_if_best(self, model: list[Any], optimizer: Any, iteration: int) -> None:
        """Export the best step as ``--save-hf`` ``/best``, unless it is there; a collective."""
        if self._exports_to and self.validations.is_best(iteration):
            folder = Path(self._exports_to) / BEST
            if self.validations.exported != iteration or self._is_missing(folder):
                self._export(model, optimizer, iteration, folder)
                self.validations.note_export(iteration)

    def _clear_exports(self, step: int) -> None:
        """Remove what stopped runs have left of exports; name those that this run, too, leaves out.

        The run goes on after `step`, whose weights it has. A collective.
        """
        if not self._exports_to:
            return
        folder = Path(self._exports_to)
        remains = targets_of_remains(folder) if dist.get_rank() == 0 else []
        for export in remains:
            discard_remains(export)
        numbers = [n for n in map(number_of, remains) if n is not None]
        steps = range(step, (self._run.args.train_iters or step) + 1)
        everyone = [[n for n in numbers if n not in steps or not self._is_export_due(n)]]
        dist.broadcast_object_list(everyone)
        best = self.validations.best
        keeps_best = self._settings.training.keep_best
        # A best step before `step` has no export, and its weights are not in memory.
        if keeps_best and best and self.validations.exported != best[0] < step:
            everyone[0].append(best[0])
        for number in everyone[0]:
            self._run.progress.say(
                f"the export of step {number} was interrupted, and this run does not make it: its "
                "weights are those of that step's checkpoint"
            )

    @cached_property
    def _changed_files(self) -> Mapping[str, bytes]:
        # The processor is loaded for it, which takes seconds, and all ranks wait for an export.
        return companions.changed_files(self._settings)

    def _export(self, model: list[Any], optimizer: Any, iteration: int, folder: Path) -> None:
        """Write a step to `folder`: weights or adapter, config and processor."""
        self._run.norms.settle()  # raises for a step that must not be exported
        first = self._settings.parallel.rank == 0
        if first and self._exports_to:
            claim_folders(self._save, self._exports_to)
        card = self._card(iteration) if first else {}
        with self._run.metrics.pause():
            if training.should_disable_forward_pre_hook(self._run.args):
                training.force_param_sync(model, optimizer=optimizer)  # overlapped gathers
            if self._run.lora is None:
                save_hf(
                    unwrap_model(model),
                    folder,
                    hf_config=self._settings.model.folder,
                    force=True,
                    changed_files={**self._changed_files, **card} if first else None,
                )
            else:
                self._run.lora.export(unwrap_model(model), folder, card)
        print_rank_0(f"exported iteration {iteration} to {folder}")
        self._run.progress.say(f"step {iteration}: exported to {folder}")

    def _card(self, iteration: int) -> dict[str, bytes]:
        """Return the model card of a step, by its file's name; nothing, if none is asked for."""
        model, lora, record = self._settings.model, self._run.lora, self._run.contract.in_effect
        if not model.model_card:
            return {}
        card = model_card.model_card(
            base=record.base,
            config=model.folder,
            head=head_of(self._settings.labels),
            training=model_card.Training(record.rows, iteration, lora.config if lora else None),
            quotes=self._quotes,
        )
        return {model_card.FILE: card}

    def _export_folder(self, iteration: int) -> Path:
        return Path(self._exports_to or "") / folder_name(iteration)


def _optimizer_and_scheduler(
    optimizer: Any = None, opt_param_scheduler: Any = None, *_: Any, **__: Any
) -> tuple[Any, Any]:
    """Return these arguments of Megatron's ``load_checkpoint``, however it is called."""
    return optimizer, opt_param_scheduler


@contextmanager
def explain_save_errors(directory: str, iteration: int) -> Iterator[None]:
    """Raise BadInput for a disk's failure while a checkpoint is saved; other errors pass through.

    Every rank saves inside this. The partial checkpoint is removed, as far as possible, to free its
    space.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        save = Path(directory)
        reason = _disk_error_behind(error)
        if isinstance(error, CheckpointException):  # raised on every rank
            # Gathered before any rank frees space by removing files.
            everyone: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, reason or find_disk_error(save, _PROBE))
            reason = next(filter(None, everyone), None)
        if reason is None:
            raise
        newest = read_tracker(save)
        if newest == iteration:  # it was damaged, and was to be replaced
            newest = max((n for n in numbered_iterations(save) if n < iteration), default=None)
        elif dist.get_rank() == 0:
            remove_checkpoint(save, iteration, ignore_errors=True)
        left = (
            "There is no earlier checkpoint"
            if newest is None
            else f"The checkpoint of step {newest} is whole"
        )
        raise BadInput(
            f"Step {iteration} could not be saved to {directory}: {reason}. {left}. Make room, "
            "or move the directory to another disk and name it with --save. The same command "
            f"then continues {'from the beginning' if newest is None else 'from there'}."
        ) from error


def _disk_error_behind(error: BaseException | None) -> str | None:
    """Return the system's message if `error`, or an error that caused it, came from the disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None
