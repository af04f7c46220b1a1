"""The same records as every kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from datasets.utils.logging import disable_progress_bar

from tests.data.conftest import question, write_tar

disable_progress_bar()

COUNT = 45
RECORDS = [question(i, image=i % 3 > 0, words=i) for i in range(COUNT)]
MESSAGES = List({"role": Value("string"), "content": Value("string")})


def as_jsonl(folder: Path, media: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def as_array(folder: Path, media: Path) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(RECORDS, indent=2))
    return path


def as_lines_called_json(folder: Path, media: Path) -> Path:
    (folder / "lines.json").write_text("\n\n".join(map(json.dumps, RECORDS)) + "\n")
    return folder / "lines.json"


def as_parquet_of_bytes(folder: Path, media: Path) -> Path:
    """Write images as a column of bytes, in row groups of an odd size."""
    rows = [{**r, "images": [_bytes(media, name) for name in r.get("images", [])]} for r in RECORDS]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet", row_group_size=17)
    return folder / "data.parquet"


def _hf(media: Path) -> Dataset:
    """Make a data set whose images are the struct of datasets' own feature."""
    images = [[str(media / Path(n).name) for n in r.get("images", [])] for r in RECORDS]
    columns = {"messages": [r["messages"] for r in RECORDS], "images": images}
    features = Features({"messages": MESSAGES, "images": List(ImageFeature())})
    return Dataset.from_dict(columns, features=features)


def as_saved(folder: Path, media: Path) -> Path:
    _hf(media).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


def as_saved_dict(folder: Path, media: Path) -> Path:
    whole = _hf(media)
    DatasetDict({"test": whole.select([0]), "train": whole}).save_to_disk(folder / "dict")
    return folder / "dict"


def as_shards(folder: Path, media: Path) -> Path:
    """Write shards like `push_to_hub`."""
    (folder / "hub" / "data").mkdir(parents=True)
    whole = _hf(media)
    for shard in range(2):
        name = f"train-0000{shard}-of-00002.parquet"
        whole.shard(2, shard, contiguous=True).to_parquet(folder / "hub" / "data" / name)
    whole.select([0]).to_parquet(folder / "hub" / "data" / "validation-00000-of-00001.parquet")
    return folder / "hub"


def as_tars(folder: Path, media: Path) -> Path:
    members = []
    for index, record in enumerate(RECORDS):
        named = {**record, "images": ["png"]} if "images" in record else record
        members.append((f"{index:03}.json", json.dumps(named).encode()))
        if "images" in record:
            members.append((f"{index:03}.png", _bytes(media, record["images"][0])))
    return write_tar(folder / "tars" / "0.tar", members).parent


def _bytes(media: Path, name: str) -> bytes:
    return (media / Path(name).name).read_bytes()


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    name.removeprefix("as_"): function
    for name, function in list(globals().items())
    if name.startswith("as_")
}
TABLES = ("parquet_of_bytes", "saved", "saved_dict", "shards")
OTHERS = [name for name in WRITERS if name != "jsonl"]
QUICK = ("array", "saved", "tars")
"""Kinds of files that stand for the others where time is short."""
