"""The package works on systems without Linux's own functions."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.storage import disk
from mcore_qwen3vl.machine import usable_cores
from mcore_qwen3vl.verify.checkpoints import roundtrip

LINUX_ONLY = ("O_DIRECT", "sched_getaffinity", "posix_fadvise", "posix_fallocate")


@pytest.fixture
def not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate macOS's ``os``, and a system that does not know Linux's advice about memory."""
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(disk, "POPULATE_READ", 9999)


def test_cores_are_those_of_this_process() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_cores_where_processes_are_not_bound_to_them(
    not_linux: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores() == 10
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_conversion_and_its_check_need_nothing_that_only_linux_has(
    not_linux: None, moe: Path, tmp_path: Path
) -> None:
    report = roundtrip(moe, tmp_path, lambda title: nullcontext(lambda *_: None))
    assert report.ok
    assert report.findings
