"""A run that goes on: its contract with the checkpoint is compared, and what differs is said."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.contract.data_sets import growth
from mcore_qwen3vl.training.contract.record import (
    OF_OPTIMIZER,
    RunRecord,
    compare,
    require_none_refused,
    validates_otherwise,
)
from mcore_qwen3vl.training.contract.rules import Notice, Steering
from mcore_qwen3vl.training.contract.table import Facts
from mcore_qwen3vl.training.data_provider import data_config

_BUILT_FROM_RECORD = ("hyperparameters", "learning rate")
"""Rows whose values the checkpoint cannot give where its version recorded none: the optimizer is
built from them."""


def record_of(args: argparse.Namespace, settings: Settings) -> RunRecord:
    """Return the record of a run, given Megatron's arguments; reads a part of its data sets."""
    return RunRecord.of_facts(Facts(args, settings, data_config(settings).length_multiple))


class Contract:
    """This run's side of the contract, on all ranks; the first rank alone reads files."""

    def __init__(
        self, args: argparse.Namespace, settings: Settings, say: Callable[[str], None]
    ) -> None:
        """Take Megatron's arguments, whose length of the run is known once a checkpoint loads."""
        self._args, self._settings, self._say = args, settings, say
        self._saved: RunRecord | None = None
        self._compares = False  # whether the checkpoint is one of a run that goes on
        self._load = settings.checkpoints.load or ""

    @cached_property
    def record(self) -> RunRecord:
        """What decides this run's result; the first rank reads a part of the data sets for it."""
        return record_of(self._args, self._settings)

    @property
    def in_effect(self) -> RunRecord:
        """This run's record, with the checkpoint's schedule where that holds; on the first rank."""
        holds = self.steering == "checkpoint" and not self._args.no_load_optim
        schedule = self._saved.rows.get("schedule") if self._saved and holds else None
        rows = {**self.record.rows, "schedule": schedule} if schedule else self.record.rows
        # A command that goes on need not name again what the run began with.
        return RunRecord(rows, self.record.base or (self._saved.base if self._saved else None))

    @property
    def steering(self) -> Steering:
        """Whose rates and schedule hold, where a flag says so."""
        if self._args.use_checkpoint_opt_param_scheduler:
            return "checkpoint"
        return "command" if self._args.override_opt_param_scheduler else None

    def check(self, iteration: int | None) -> None:
        """Compare this run with the record in the checkpoint that it loads; a collective.

        Args:
            iteration: None: the checkpoint has weights alone, and nothing goes on.

        Raises:
            BadInput: a difference is not allowed.
        """
        self._compares = self._goes_on(iteration)
        if not self._compares:
            if self._settings.checkpoints.save:
                self._conclude(self._record_beginning)
            return
        assert iteration is not None
        self._conclude(lambda: self._compare_recorded(iteration))

    def check_arguments(self, saved: argparse.Namespace) -> None:
        """Compare with a checkpoint's arguments what its version did not record; a collective.

        Weights of a conversion have arguments too, with which no run goes on.
        """
        if self._compares:
            self._conclude(lambda: self._compare_unrecorded(saved))

    def write(self, iteration: int) -> None:
        """Write the record into ``--save``; the first rank does."""
        if dist.get_rank() == 0:
            assert self._settings.checkpoints.save is not None
            self.in_effect.write(self._settings.checkpoints.save, iteration)

    def saved_value(self, row: str, name: str) -> Any:
        """Return a value of the checkpoint; the first rank knows it, and all call this."""
        found = [self._saved.value(row, name) if self._saved else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def validates_otherwise(self) -> bool:
        """Return whether the checkpoint's run validated otherwise than this one; a collective."""
        # The first rank alone has compared the checkpoint.
        found = [self._saved is not None and validates_otherwise(self._saved, self.record)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _goes_on(self, iteration: int | None) -> bool:
        settings = self._settings
        measures = settings.loop.skip_train and not settings.model.save_hf
        return iteration is not None and not (settings.checkpoints.finetune or measures)

    def _record_beginning(self) -> list[Notice]:
        """Record the data as they are when the run begins."""
        _ = self.record
        return []

    def _compare_recorded(self, iteration: int) -> list[Notice]:
        self._saved = saved = RunRecord.of_checkpoint(self._load, iteration) or RunRecord({})
        if "data sets" not in saved.rows:
            return self._compare(saved, self.record)
        before, held = saved.rows["data sets"], self.record.rows["data sets"]
        state = data_state.first_state_of(self._load, iteration)
        held = {**held, **growth(self._settings, before, held, state)}
        return self._compare(saved, RunRecord({**self.record.rows, "data sets": held}))

    def _compare_unrecorded(self, saved: argparse.Namespace) -> list[Notice]:
        """Compare the rows that the record lacks with Megatron's saved arguments."""
        assert self._saved is not None
        lacking = self._saved.lacks(self.record)
        if not lacking:
            return []
        of_arguments = RunRecord.of_facts(Facts(saved))
        found = self._compare(
            RunRecord({n: v for n, v in of_arguments.rows.items() if n in lacking}), self.record
        )
        if self.steering == "checkpoint":
            found = [_as_refused(each) for each in found]
        self._saved = self._saved.completed_by(of_arguments)
        if unknown := self._saved.lacks(self.record):
            text = "the checkpoint is of an earlier version, and does not say all of "
            text += f"{', '.join(unknown)}: what it does not say is not compared"
            found.append(Notice("", text))
        return found

    def _compare(self, saved: RunRecord, now: RunRecord) -> list[Notice]:
        leave_out = OF_OPTIMIZER if self._args.no_load_optim else ()
        return compare(saved, now, steering=self.steering, leave_out=leave_out)

    def _conclude(self, find: Callable[[], Sequence[Notice]]) -> None:
        """Let the first rank compare; then say what it found, or stop, on all ranks."""
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                findings = find()
                require_none_refused(findings, self._load)
                answer = [[finding.text for finding in findings]]
            except BadInput as flaw:
                answer = [flaw]
            except OSError as flaw:  # the other ranks wait for an answer
                answer = [BadInput(f"The data of this run cannot be read: {flaw}.")]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], BadInput):
            raise answer[0]
        for text in answer[0]:
            self._say(text)


def _as_refused(finding: Notice) -> Notice:
    """Refuse to take a checkpoint's values that its version did not record for that."""
    if finding.row not in _BUILT_FROM_RECORD:
        return finding
    text = f"{finding.text}: it is of an earlier version. Give its values"
    return replace(finding, text=f"{text}.", refused=True)
