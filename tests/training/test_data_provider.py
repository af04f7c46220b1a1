"""The data provider opens the data where every rank may wait for those that measure."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.sharing import rank_reads
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training import data_provider
from mcore_qwen3vl.training.data_provider import DataProvider
from mcore_qwen3vl.verification.curves import Job, train
from tests.training.log import validation_losses


def test_no_stage_waits_for_measuring_in_a_group_with_a_short_timeout(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader opens its data only once the later stage is where it may wait for hours."""
    patient = multiprocessing.get_context("fork").Event()
    open_data, wait = DataProvider._open_loader, data_provider.wait_for_measuring

    def opened_late(self: DataProvider, *given: Any, **more: Any) -> Any:
        if rank_reads():
            assert patient.wait(30), "the later stage waits for the reader elsewhere"
        return open_data(self, *given, **more)

    def waited_for() -> None:
        if not rank_reads():
            patient.set()
        wait()

    monkeypatch.setattr(DataProvider, "_open_loader", opened_late)
    monkeypatch.setattr(data_provider, "wait_for_measuring", waited_for)
    job = Job(
        dense, data, Layout.parse("pp2"), steps=2, batch=2, seq_length=256, packing=True,
        flags=("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "1"),
    )  # fmt: skip
    assert len(train(job, tmp_path / "run")) == job.steps
    assert len(validation_losses(tmp_path / "run")) == 2
