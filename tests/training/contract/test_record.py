"""A record is read as it was written, and one that no run wrote is damaged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.contract.record import RunRecord, compare
from mcore_qwen3vl.training.contract.table import Facts
from tests.training.contract.conftest import record


def test_a_record_is_read_as_it_was_written(dense: Path, folder: Path, tmp_path: Path) -> None:
    ours = record(dense, folder, "")
    ours.write(tmp_path, 3)
    again = RunRecord.of_checkpoint(tmp_path, 3)
    assert again is not None
    assert again.rows == ours.rows
    assert RunRecord.of_checkpoint(tmp_path, 4) is None


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("data sets", {"content": [{"sizes": "12", "digest": "a"}]}),
        ("data sets", {"content": [3]}),
        ("data sets", {"content": 3}),
        ("data sets", {"names": ["a", "b"]}),
        ("mixture", {"shares": ["half"]}),
        ("packs", {"length_multiple": "2"}),
        ("length of the run", {"num_epochs": "two"}),
        ("length of the run", {"train_iters": {}}),
        ("batch", {"global_batch_size": "8"}),
        ("schedule", {"wsd": [[]]}),
        ("learning rate", {"lr": True}),
        ("order", 7),
    ],
)
def test_a_record_that_cannot_be_compared_is_damaged(
    row: str, values: Any, dense: Path, folder: Path, tmp_path: Path
) -> None:
    ours = record(dense, folder, "")
    changed = {**ours.rows[row], **values} if isinstance(values, dict) else values
    RunRecord({**ours.rows, row: changed}).write(tmp_path, 3)
    with pytest.raises(BadInput, match=r"run\.json is damaged \(.*\)\. Copy it again"):
        RunRecord.of_checkpoint(tmp_path, 3)


def test_a_record_whose_values_no_run_wrote_is_damaged(
    dense: Path, folder: Path, tmp_path: Path
) -> None:
    ours = record(dense, folder, "")
    theirs = RunRecord({**ours.rows, "files of the loss": {"beside": [["scores"]]}})
    with pytest.raises(BadInput, match=r"says of files of the loss is damaged \(ValueError"):
        compare(theirs, ours)


def test_arguments_of_an_earlier_version_say_what_they_have() -> None:
    """They lack what was added since, such as `packing`; other rows are compared."""
    args = argparse.Namespace(seed=7, clip_grad=1.0, lr=1e-3, global_batch_size=4)
    rows = RunRecord.of_facts(Facts(args)).rows
    assert rows["order"] == {"seed": 7}
    assert rows["gradient clipping"] == {"clip_grad": 1.0}
    assert not {"packs", "row length", "schedule", "optimizer's state"} & {*rows}
