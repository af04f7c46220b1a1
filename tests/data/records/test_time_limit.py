"""A record that takes too long is a bad one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.reading import BadSample, time_limit
from tests.data.conftest import WriteJsonl, chat, question

LIMIT = 1.0


def stubborn(record: dict[str, Any]) -> dict[str, Any]:
    """Hang at one record, and hang once more when interrupted."""
    if "sample 1" in str(record):
        try:
            time.sleep(60)
        except BadSample:
            time.sleep(60)
    return record


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 40


def test_a_hook_that_hangs(processor: Any, write_jsonl: WriteJsonl) -> None:
    sys.modules.setdefault(__name__, sys.modules[stubborn.__module__])
    path = write_jsonl([question(i, image=False) for i in range(3)])
    config = DataConfig(seq_length=256, max_sample_seconds=LIMIT)
    report = check_data(path, processor, config, preprocess=f"{__name__}:stubborn")
    assert len(report.tokens) == 2
    (flaw,) = report.bad
    assert flaw.sample.endswith("data.jsonl:2")
    assert "takes more than 1 s (--max-sample-seconds)" in flaw.reason


def test_pipes_and_devices_are_not_opened(
    processor: Any, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    records = [
        {**chat(("user", "<image>?"), ("assistant", "a")), "images": [name]}
        for name in ("pipe.png", "endless.png")
    ]
    report = check_data(write_jsonl(records), processor, DataConfig(seq_length=256))
    assert [flaw.reason.rsplit("/", 1)[-1] for flaw in report.bad] == [
        "pipe.png is not a regular file.",
        "endless.png is not a regular file.",
    ]


def test_the_limit_ends_with_its_block_and_the_outer_one_counts() -> None:
    with time_limit(0.2), time_limit(60), pytest.raises(BadSample, match=r"more than 0\.2 s"):
        time.sleep(60)
    time.sleep(1.5)  # an alarm that was left would interrupt this
    with time_limit(0):
        time.sleep(0.1)
