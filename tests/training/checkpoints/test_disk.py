"""A run whose disk is full while it saves."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.checkpoints.run_checkpoints import explain_save_errors
from mcore_qwen3vl.verification import curves
from mcore_qwen3vl.verification.curves import Job, train
from tests.test_atomic import full_disk

ROOM = 700_000  # bytes a file may have; a rank writes two million


def rank_without_room(*args: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    curves.run_rank(*args)


@pytest.mark.slow
def test_the_checkpoint_before_is_kept_and_the_message_says_how_to_go_on(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    flags = ("--save", str(save), "--save-interval", "1")
    job = Job(dense, data, Layout.parse("dp2"), steps=2, batch=2, seq_length=256, flags=flags)
    train(job, tmp_path / "first", "--exit-interval", "1")
    before = {file for file in save.rglob("*") if "logs" not in file.parts}
    output = tmp_path / "output.txt"
    said = rf"Step 2 could not be saved to {save}: File too large\. The checkpoint of step 1 is"
    with pytest.raises(BadInput, match=said):
        run_layout(rank_without_room, 2, job.argv, output, timeout=300)
    assert {file for file in save.rglob("*") if "logs" not in file.parts} == before
    (entry,) = train(job, tmp_path / "again")
    assert entry["iteration"] == 2


def test_another_failure_is_raised_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), explain_save_errors(str(tmp_path), 1):
        raise ZeroDivisionError


def test_a_full_disk_is_named_as_such_where_the_position_in_the_data_is_saved(
    tmp_path: Path,
) -> None:
    class Reading:
        def state_dict(self, position: Any) -> dict[str, Any]:
            return {"positions": list(range(1000))}

    loader: Any = Reading()
    with full_disk(64), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        data_state.save(loader, tmp_path, 3, 0)  # a limit's error, in place of a full disk's
    assert not list(tmp_path.rglob("rank_*.pt"))
