"""Later pipeline stages wait for the data as long as measuring it takes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training import data_provider
from mcore_qwen3vl.training.data_provider import DataProvider
from mcore_qwen3vl.verify.curves import Job, train


def test_no_stage_waits_for_measuring_in_a_group_with_a_short_timeout(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader opens its data only once the later stage is where it may wait for hours."""
    patient = multiprocessing.get_context("fork").Event()
    open_data, wait = DataProvider._loader, data_provider.wait_for_measuring

    def opened_late(self: DataProvider, *given: Any, **more: Any) -> Any:
        if data_provider.rank_reads():
            assert patient.wait(30), "the later stage waits for the reader elsewhere"
        return open_data(self, *given, **more)

    def waited_for() -> None:
        if not data_provider.rank_reads():
            patient.set()
        wait()

    monkeypatch.setattr(DataProvider, "_loader", opened_late)
    monkeypatch.setattr(data_provider, "wait_for_measuring", waited_for)
    job = Job(
        dense, data, Layout.parse("pp2"), steps=2, batch=2, seq_length=256, packing=True,
        flags=("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "1"),
    )  # fmt: skip
    assert len(train(job, tmp_path / "run")) == job.steps
    entries = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert sum("validation lm loss" in entry for entry in entries) == 2
