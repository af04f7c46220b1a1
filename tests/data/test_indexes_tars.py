"""Samples of a tar that would replace one another, and a tar with a wrong index."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig, indexes
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import question, write_tar
from tests.data.test_unread import RECORDS, named, prepare


def test_a_key_twice_in_a_row(processor: Any, tmp_path: Path) -> None:
    record = [json.dumps(question(i, image=False)).encode() for i in range(3)]
    twice = [("a/0.json", record[0]), ("a/0.json", record[1]), ("a/1.json", record[2])]
    write_tar(tmp_path / "tars" / "0.tar", [("z.json", record[0])])
    write_tar(tmp_path / "tars" / "1.tar", twice)
    said = rf"{tmp_path}/tars/1\.tar: the sample a/0 has 2 files a/0\.json, of which only the last"
    for _ in range(2):  # the second time, too
        with pytest.raises(BadInput, match=said):
            check_data(tmp_path / "tars", processor, DataConfig(seq_length=64))
    write_tar(tmp_path / "tars" / "1.tar", [("a/0.json", record[0]), ("a/1.json", record[2])])
    assert len(check_data(tmp_path / "tars", processor, DataConfig(seq_length=512)).tokens) == 3


TWICE = [("a/0.json", RECORDS[0]), ("a/0.json", RECORDS[1]), ("a/1.json", RECORDS[2])]


def test_a_key_twice_in_an_index_of_others(processor: Any, tmp_path: Path) -> None:
    """Energon's own preparation, and an earlier version of this package, take both for one."""
    folder, earlier = tmp_path / "tars", tmp_path / "earlier"
    for place in (folder, earlier):
        write_tar(place / "0.tar", TWICE)
    prepare(folder, ["0.tar"])
    stand_in = indexes.cache_of(earlier) / earlier.name
    indexes._make_stand_in(earlier, stand_in)
    prepare(stand_in, ["0.tar"])
    for place in (folder, earlier):
        said = rf"{place}/0\.tar: the sample a/0 has 2 files a/0\.json, of which only the last"
        for _ in range(2):
            with pytest.raises(BadInput, match=said) as raised:
                check_data(place, processor, DataConfig(seq_length=64))
            assert (f"remove {place}/.nv-meta" in str(raised.value)) == (place == folder)
    with pytest.raises(BadInput, match="the sample a/0 has 2 files"):
        indexes.index_beside(folder)  # as of a metadataset


def test_an_index_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "tars" / "0.tar", TWICE[1:])
    prepare(tmp_path / "tars", ["0.tar"])
    indexes.ensure_index(tmp_path / "tars")
    monkeypatch.setattr(indexes, "_doubled_part", lambda path: pytest.fail("again"))
    indexes.ensure_index(tmp_path / "tars")
    assert named(tmp_path / "tars") == []
    (tmp_path / "tars" / ".nv-meta" / "index.sqlite").unlink()
    indexes.ensure_index(tmp_path / "tars")
    assert named(tmp_path / "tars") == [
        "samples of one key that lie next to each other (the index does not list the files of "
        "samples, so they were not looked for)"
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_a_tar_that_was_written_after_its_index(count: int, tmp_path: Path) -> None:
    def write(samples: int) -> None:
        record = json.dumps({"text": "a" * 700 * samples}).encode()
        write_tar(tmp_path / "0.tar", [(f"{n}.json", record) for n in range(samples)])

    write(2)
    indexes.index_beside(tmp_path)
    later = time.time_ns() + 10**9
    os.utime(tmp_path / "0.tar", ns=(later, later))  # as a copy may be
    assert indexes.ensure_index(tmp_path) == tmp_path
    write(count)
    os.utime(tmp_path / "0.tar", ns=(later, later))
    with pytest.raises(BadInput, match=r"0\.tar was written after its index"):
        indexes.ensure_index(tmp_path)
