"""The record of a run in its checkpoints: its values by the table's rows, and their comparison.

``run.json`` lies beside the position in the data. It is plain text, so that anybody can read what a
checkpoint was trained with, and two of them can be compared without loading anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write, refuse_special_files
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.model_card import name_of_model
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.checkpoints.resume import resumed_step
from mcore_qwen3vl.training.contract.rules import Notice, Steering, Values
from mcore_qwen3vl.training.contract.table import ROWS, STYLES, ContractRow, Facts

FILE = "run.json"
_VERSION = 1
OF_OPTIMIZER = (
    *("optimizer", "hyperparameters", "learning rate", "schedule", "weight decay"),
    "optimizer's state",
)
"""Rows about what ``--no-load-optim`` does not load."""


OF_VALIDATION = ("validation", "reading of records", "row length", "settings of the loss")
"""Rows on which the loss of a validation depends, but for the model."""
_RENAMED = {"further token": "MTP"}
"""Names that earlier versions gave to rows."""
_OF_TRAINING = ("mixture", "packing")
"""Values of the reading of records that are about training records."""


@dataclass(frozen=True)
class RunRecord:
    """The values that decide a run's result, by the rows of :data:`.table.ROWS`.

    A row that an earlier version did not record is absent, or lacks values.

    Attributes:
        base: the hub id, or the folder's name, of the weights that the run began with, for a model
            card; None: random ones, or not known. It is not compared.
    """

    rows: Mapping[str, Values]
    base: str | None = None

    @classmethod
    def of_facts(cls, facts: Facts) -> RunRecord:
        """Return what the facts say; with settings this reads a part of the data sets."""
        values = {row.name: _values_of(row, facts) for row in ROWS}
        start = facts.settings and (facts.settings.start or _load_of_new_run(facts.settings))
        base = name_of_model(start) if start else None
        return cls({name: found for name, found in values.items() if found}, base)

    @classmethod
    def of_checkpoint(cls, checkpoints: str | Path, iteration: int) -> RunRecord | None:
        """Return the record in a checkpoint, as far as its version kept one; None: nothing.

        Raises:
            BadInput: the file is damaged.
        """
        file = data_state.folder_of(checkpoints, iteration) / FILE
        refuse_special_files(file.parent)
        if not file.exists():
            state = data_state.first_state_of(checkpoints, iteration)
            return None if state is None else cls(_rows_of_state(state))
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
            rows = {
                _RENAMED.get(name, str(name)): dict(values)
                for name, values in content["rows"].items()
            }
            for row in ROWS:
                row.require_comparable(rows.get(row.name, {}))
            base = content.get("base")
            return cls(rows, base if isinstance(base, str) else None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{file} is damaged ({error}). Copy it again.") from None

    def write(self, checkpoints: str | Path, iteration: int) -> None:
        """Write ``run.json`` beside the position in the data; it appears whole or not at all."""
        file = data_state.folder_of(checkpoints, iteration) / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        base = {} if self.base is None else {"base": self.base}
        text = json.dumps({"version": _VERSION, **base, "rows": self.rows}, indent=1)
        with atomic_write(file, remedy=None) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    def value(self, row: str, name: str) -> Any:
        """Return a recorded value, or None."""
        return self.rows.get(row, {}).get(name)

    def rates_and_schedule(self) -> dict[str, Any]:
        """Return the arguments that the optimizer and the schedule of its rates are built from.

        What the schedule counts in samples is left out, because Megatron keeps that with its state.
        The decay of WSD is not: without it Megatron makes no schedule.
        """
        rows = [self.rows.get(name, {}) for name in ("hyperparameters", "learning rate")]
        schedule, decay = self.rows.get("schedule", {}), dict(self.rows.get("weight decay", {}))
        if decay.get("weight_decay_incr_style") == "constant":  # Megatron derives both
            decay = {name: v for name, v in decay.items() if not name.startswith(("start", "end"))}
        styles = {name: schedule[name] for name in STYLES if name in schedule}
        if wsd := schedule.get("wsd"):
            batch = schedule.get("batch")
            styles |= (
                {"lr_wsd_decay_iters": round(wsd / batch)}
                if batch
                else {"lr_wsd_decay_samples": wsd}
            )
        return {name: value for row in (*rows, decay, styles) for name, value in row.items()}

    def completed_by(self, other: RunRecord) -> RunRecord:
        """Return this record with the values of another one for what it lacks."""
        names = {*self.rows, *other.rows}
        rows = {n: {**other.rows.get(n, {}), **self.rows.get(n, {})} for n in names}
        return RunRecord(rows, self.base)

    def lacks(self, now: RunRecord) -> list[str]:
        """Return the rows of `now` whose values this record lacks, or has only as sizes."""
        only_sizes = any(
            held["digest"] is None for held in self.value("data sets", "content") or ()
        )
        return [
            name
            for name, values in now.rows.items()
            if not values.keys() <= self.rows.get(name, {}).keys()
            or (name == "data sets" and only_sizes)
        ]


def compare(
    before: RunRecord, now: RunRecord, *, steering: Steering = None, leave_out: Sequence[str] = ()
) -> list[Notice]:
    """Return what to say of a resumed run: the rows that have changed, in order.

    Args:
        before: of the checkpoint.
        now: of the resuming command.
        steering: whose rates and schedule hold, where a flag says so.
        leave_out: names of rows that do not count.

    Raises:
        BadInput: no run records such values of a row as the checkpoint has.
    """
    found: list[Notice] = []
    for row in ROWS:
        if row.name in leave_out or row.name not in before.rows or row.name not in now.rows:
            continue
        try:
            found += row.findings(before.rows[row.name], now.rows[row.name], steering)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"What {FILE} of the checkpoint says of {row.name} is damaged ({error!r:.200}). "
                "Copy it again, or begin a new run from its weights with --finetune."
            ) from error
    return found


def validates_otherwise(before: RunRecord, now: RunRecord) -> bool:
    """Return whether losses of validations cannot be compared, as far as both records say."""
    for name in OF_VALIDATION:
        was, is_now = before.rows.get(name, {}), now.rows.get(name, {})
        known = was.keys() & is_now.keys()
        known -= {"names"} if name == "validation" else set(_OF_TRAINING)
        if any(was[value] != is_now[value] for value in known):
            return True
    return False


def require_none_refused(findings: Sequence[Notice], directory: str) -> None:
    """Raise BadInput with all findings that stop the run, if there are any."""
    refused = [finding.text for finding in findings if finding.refused]
    if refused:
        raise BadInput(
            f"The run in {directory} cannot go on with this command. {' '.join(_ends(refused))} Or "
            f"begin a new run from its weights: --load {directory} --finetune, and another --save."
        )


def _values_of(row: ContractRow, facts: Facts) -> Values:
    """Return a row's values; none, if a checkpoint's arguments lack some of what they follow from.

    Those of earlier versions, and of Megatron's own runs, may.
    """
    try:
        return row.values(facts)
    except (AttributeError, KeyError):
        if facts.settings is not None:
            raise
        return {}


def _load_of_new_run(settings: Settings) -> str | None:
    """Return ``--load`` if a run begins with its weights; None if it goes on with its training."""
    load = settings.checkpoints.load
    if load is None or resumed_step(settings.checkpoints) is not None:
        return None
    return load if identify(load).kind is PathKind.MEGATRON else None


def _ends(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield sentence[0].upper() + sentence[1:]


def _rows_of_state(state: Mapping[str, Any]) -> dict[str, Values]:
    """Return what earlier versions kept beside a rank's position in the data.

    Sizes of folders counted other files, too, and are left out.
    """
    rows: dict[str, Values] = {}
    if sources := state.get("sources"):
        rows["data sets"] = {
            "names": [name for name, _ in sources],
            "content": [
                {"sizes": [size] if Path(name).suffix else [], "digest": None}
                for name, size in sources
            ],
        }
    if batch := state.get("global_batch_size"):
        rows["batch"] = {"global_batch_size": batch}
    epochs, steps = state.get("num_epochs") or (None, None)
    if epochs is not None:
        rows["length of the run"] = {"num_epochs": epochs, "train_iters": steps}
    return rows
