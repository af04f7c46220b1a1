"""Scoring that is killed at any write goes on, and scores never have the facts of others."""

from __future__ import annotations

import json
import multiprocessing
import signal
from itertools import count
from pathlib import Path

import pytest

from mcore_qwen3vl.data.scores import facts_file_of
from mcore_qwen3vl.scoring.records import Output
from tests.writes import kill_at

SETTINGS = {"temperature": 1.0}


def entries(log_prob: float) -> list[dict[str, float]]:
    return [{"record": n, "tokens": 3, "log_prob": log_prob} for n in range(3)]


def run(file: Path, log_prob: float, *, force: bool) -> None:
    """Score three records, one a block, as the command does: what is there is gone on with."""
    output = Output(file, SETTINGS, block=1)
    output.check(force=force)
    for entry in entries(log_prob)[output.open(force=force) :]:
        output.append([entry])
    output.finish()


def killed_run(file: Path, number: int, log_prob: float, force: bool) -> None:
    kill_at(file.parent, number)
    run(file, log_prob, force=force)


def is_killed(file: Path, number: int, log_prob: float, *, force: bool) -> bool:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=killed_run, args=(file, number, log_prob, force))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def log_prob_of(file: Path) -> float:
    """Return the log-probability of all records, after a look at the facts beside them."""
    (value,) = {json.loads(line)["log_prob"] for line in file.read_text().splitlines()}
    assert json.loads(facts_file_of(file).read_text())["summary"]["log_prob"] == 3 * value
    return float(value)


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_each_write(force: bool, tmp_path: Path) -> None:
    for number in count(1):
        file = tmp_path / str(number) / "scores.jsonl"
        file.parent.mkdir()
        if force:
            run(file, -2.0, force=False)
        if not is_killed(file, number, -1.0, force=force):
            break
        if file.exists():
            assert log_prob_of(file) in ((-2.0, -1.0) if force else (-1.0,))
        if not file.exists() or force:
            run(file, -1.0, force=force)
        assert log_prob_of(file) == -1.0
    assert number > 8
