"""Scoring that is killed at any write goes on, and each text or error is a row."""

from __future__ import annotations

import base64
import json
import multiprocessing
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mcore_qwen3vl.data.scores import facts_file_of
from mcore_qwen3vl.scoring.records import Output, tally, write_npy, write_parquet
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


def test_each_text_and_each_error_is_a_row(tmp_path: Path) -> None:
    values = np.array([[0.6, -0.8], [1.0, 0.0]], "<f4")
    query, positive = (
        {"embedding": base64.b64encode(row.tobytes()).decode(), "digest": "0"} for row in values
    )
    lines = tmp_path / "lines"
    entries = [{"line": 1, "query": query, "positive": positive}, {"line": 2, "error": "bad"}]
    lines.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    write_parquet(lines, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["line"], row["text"], row["error"]) for row in rows] == [
        (1, "query", None),
        (1, "positive", None),
        (2, None, "bad"),
    ]
    assert [row["embedding"] for row in rows[:2]] == values.tolist()
    write_npy(lines, tmp_path / "out.partial")
    array = np.load(tmp_path / "out.partial")
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, [*values, [np.nan, np.nan]])
    found = tally(lines)
    assert (found.scored, found.embeddings, found.bad, found.perplexity) == (1, 2, 1, None)
