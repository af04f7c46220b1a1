"""What a folder lacks, and what nothing reads in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from megatron.energon.flavors import BaseWebdatasetFactory

from mcore_qwen3vl.data import DataConfig, indexes, unread
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.unread import unread_files
from tests.data.conftest import question, write_tar
from tests.data.loaders import MakeLoader

ROWS = [{"text": f"text {i}"} for i in range(3)]


def write_parquet(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS), file)


def shard(number: int, total: int = 3, split: str = "train", suffix: str = "parquet") -> str:
    return f"{split}-{number:05}-of-{total:05}.{suffix}"


def named(folder: Path, split: str = "train") -> list[str]:
    return [str(item) for item in unread_files(folder, split)]


def test_missing_shards_and_stray_files_of_a_table(tmp_path: Path) -> None:
    for number in (0, 2):
        write_parquet(tmp_path / "data" / shard(number))
    assert named(tmp_path) == [f"data/{shard(1)} (it is missing)"]
    write_parquet(tmp_path / "data" / shard(1))
    write_parquet(tmp_path / "data" / shard(0, 1, "validation"))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert named(tmp_path) == []
    assert named(tmp_path, "val") == []
    write_parquet(tmp_path / "data" / "more.parquet")  # of no split, where others have one
    for stray in ("extra.jsonl", "rest.csv", "data/half.incomplete", ".cache/old.jsonl"):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("{}")
    strays = ("data/half.incomplete", "data/more.parquet", "extra.jsonl", "rest.csv")
    assert named(tmp_path) == [f"{name} (no part of it is read)" for name in strays]


def test_of_tars_and_of_a_dataset_on_disk(tmp_path: Path) -> None:
    tars, saved = tmp_path / "tars", tmp_path / "saved"
    for number in (1, 3):
        write_tar(tars / shard(number, 4, "a", "tar"), [(f"{number}.txt", b"x")])
    (tars / "labels.json").write_text("{}")
    missing = [f"{shard(number, 4, 'a', 'tar')} (it is missing)" for number in (0, 2)]
    assert named(tars) == [*missing, "labels.json (no part of it is read)"]
    Dataset.from_list(ROWS).save_to_disk(str(saved))
    assert named(saved) == []
    (saved / "data-00001-of-00002.arrow").write_bytes(b"")
    assert named(saved) == ["data-00001-of-00002.arrow (no part of it is read)"]
    (tmp_path / "one.jsonl").write_text("{}")
    assert named(tmp_path / "one.jsonl") == []


def test_the_report_and_a_run_name_them(
    processor: Any, make: MakeLoader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 2):
        write_parquet(tmp_path / shard(number))
    report = check_data(tmp_path, processor, DataConfig(seq_length=64))
    assert f"not used of the data set {tmp_path}" in dict(report.summary())
    make(tmp_path, config=DataConfig(seq_length=64), dp_rank=1, dp_size=2)
    assert capsys.readouterr().err == ""
    make(tmp_path, config=DataConfig(seq_length=64), dp_rank=0, dp_size=2)
    assert f"{shard(1)} (it is missing)" in capsys.readouterr().err


def prepare(folder: Path, tars: list[str], **splits: Any) -> None:
    """Index tars as energon's own preparation does, with these splits in place of its own."""
    BaseWebdatasetFactory.prepare_dataset(folder, tars, split_parts_ratio=[("train", 1.0)])
    (folder / ".nv-meta" / "dataset.yaml").write_text(indexes._CRUDE)
    if splits:
        (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(splits))


RECORDS = [json.dumps(question(i, image=False)).encode() for i in range(4)]


@pytest.mark.parametrize("split_file", ["split.yaml", "split.json"])
def test_tars_that_an_index_does_not_list(split_file: str, processor: Any, tmp_path: Path) -> None:
    for number in range(4):
        write_tar(tmp_path / f"{number}.tar", [(f"{number}.json", RECORDS[number])])
    write_tar(tmp_path / "more" / "4.tar", [("4.json", RECORDS[0])])
    splits = {"split_parts": {"train": ["{0..1}.tar"], "val": ["2.tar"]}, "exclude": ["1.tar"]}
    prepare(tmp_path, ["0.tar", "1.tar", "2.tar"], **splits)
    (tmp_path / ".nv-meta" / "split.yaml").rename(tmp_path / ".nv-meta" / split_file)
    stray = [f"{name} (no part of it is read)" for name in ("3.tar", "more/4.tar")]
    assert named(tmp_path) == named(tmp_path, "val") == stray
    for split in ("train", "val", "test"):
        config = DataConfig(seq_length=512)
        assert check_data(tmp_path, processor, config, split=split).samples == 1
    (tmp_path / "2.tar").unlink()
    assert named(tmp_path) == ["2.tar (it is missing, and the index lists it)", *stray]


def test_few_files_of_a_large_folder_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "_MOST_LOOKED_AT", 3)
    write_tar(tmp_path / "0.tar", [("0.json", b"{}")])
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("more.csv", "a/0.jpg"):
        (tmp_path / name).write_text("")
    stray = ["more.csv (no part of it is read)"]
    assert named(tmp_path) == stray
    for name in ("a/b/rest.csv", "a/b/1.jpg"):
        (tmp_path / name).write_text("")
    others = "other files that nothing reads (it holds more than 3, of which the first were looked"
    assert named(tmp_path) == [*stray, f"{others} at)"]


def test_shards_that_count_from_one(tmp_path: Path) -> None:
    for number in (1, 3):
        write_parquet(tmp_path / shard(number))
    assert named(tmp_path) == [f"{shard(2)} (it is missing)"]
    write_parquet(tmp_path / shard(2))
    assert named(tmp_path) == []


def test_of_many_some_are_named_and_the_others_counted(tmp_path: Path) -> None:
    """Few shards of a large data set are often taken on purpose."""
    write_parquet(tmp_path / shard(2, 99_999_999))
    for number in range(12):
        (tmp_path / f"{number:02}.json").write_text("{}")
    some = [*range(2), *range(3, 11)]
    assert named(tmp_path) == [
        *(f"{shard(number, 99_999_999)} (it is missing)" for number in some),
        "99,999,988 more (it is missing)",
        *(f"{number:02}.json (no part of it is read)" for number in range(10)),
        "2 more (no part of it is read)",
    ]


def test_names_with_further_dots_are_named(tmp_path: Path, processor: Any) -> None:
    record = json.dumps({"text": "a"}).encode()
    write_tar(tmp_path / "0.tar", [("v1.5.json", record), ("v1.6.json", record)])
    (bad,) = check_data(tmp_path, processor, DataConfig(seq_length=64)).bad
    assert "its parts are 5.json, 6.json: in a tar, the name of a sample ends at" in str(bad)
