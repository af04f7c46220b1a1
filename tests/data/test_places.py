"""A record is named by its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from tests.data.conftest import write_tar


def test_a_sample_of_a_tar_is_named_by_its_key(processor: Any, tmp_path: Path) -> None:
    for name in ("0", "1"):
        members = [(f"part{name}/{key}.x.json", b"{}") for key in ("b", "a")]
        write_tar(tmp_path / "tars" / f"{name}.tar", members)
    report = check_data(tmp_path / "tars", processor, DataConfig(seq_length=64))
    assert sorted(flaw.sample for flaw in report.bad) == [
        f"{tmp_path}/tars/{name}.tar[part{name}/{key}]" for name in ("0", "1") for key in ("a", "b")
    ]
