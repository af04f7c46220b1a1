"""Tables are read by parts in any order, and rows that are bad are named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.readers import tables
from mcore_qwen3vl.data.readers.tables import TableReader
from mcore_qwen3vl.errors import BadInput
from tests.data import writers
from tests.data.loaders import MakeLoader
from tests.data.writers import COUNT, RECORDS, TABLES


def test_a_table_is_read_by_parts_in_any_order(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading forwards decodes a batch once; going back decodes its row group again."""
    monkeypatch.setattr(tables, "_BATCH", 4)
    monkeypatch.setattr(tables, "_KEPT", 2)
    reader = TableReader(written("parquet_of_bytes"))
    assert [(group.number, group.rows, group.first) for group in reader.groups] == [
        (0, 17, 0),
        (1, 17, 17),
        (2, 11, 34),
    ]
    order = [*range(40, 45), *range(10), 44, 17, 16, 33, 34, 0]
    for index in order:
        sample = reader[index]
        assert sample["json"]["messages"] == RECORDS[index]["messages"]
        assert sample["__sources__"][0].index == index


def test_a_table_of_large_rows_is_held_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is limited whatever the number of rows; small rows are read 32 at a time."""
    monkeypatch.setattr(tables, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(tables, "_KEPT_BYTES", 3 << 20)
    large = [random.Random(i).randbytes(200_000) for i in range(40)] + [b"a" * 1_500_000] * 2
    for name, rows in (("large", large), ("small", [b"a"] * 200)):
        table = pa.table({"image": rows})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=40, use_dictionary=False)
    reader = TableReader(tmp_path / "large.parquet")
    assert [group.batch for group in reader.groups] == [5, 1]
    for index in [*range(42), 3, 17, 41, 0]:
        assert reader[index]["json"]["image"] == large[index]
        assert 0 < reader.buffered_bytes <= 3 << 20
    small = TableReader(tmp_path / "small.parquet")
    assert {group.batch for group in small.groups} == {32}


@pytest.mark.parametrize("cuts", [[4, 4, 2], [1, 2, 3, 4], [7, 3], [10], [3, 1, 4, 2]])
def test_batches_are_of_one_size_however_pyarrow_cuts_them(
    cuts: list[int],
) -> None:
    whole = pa.RecordBatch.from_pydict({"a": list(range(10))})
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    batches = [whole.slice(start, rows) for start, rows in zip(starts, cuts, strict=True)]
    found = [b.column("a").to_pylist() for b in tables._rebatch(iter(batches), 4)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_map_of_a_table_is_an_object(tmp_path: Path) -> None:
    """Tables hold the arguments of calls as maps, since each function has its own."""
    calls = pa.array([[("city", "Bern"), ("unit", "c")]], pa.map_(pa.string(), pa.string()))
    twice = pa.array([[("city", "Bern"), ("city", "Ulm")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(
        pa.table({"arguments": pa.concat_arrays([calls, twice])}), tmp_path / "a.parquet"
    )
    reader = TableReader(tmp_path / "a.parquet")
    assert reader[0]["json"] == {"arguments": {"city": "Bern", "unit": "c"}}
    with pytest.raises(KeyError, match="city"):
        reader[1]


def test_nested_nulls_of_a_table_are_keys_that_a_record_lacks(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "loss": True}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}, answer]},
        {"texts": ["t", None], "images": [None, {"bytes": b"x", "path": None}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=_union(rows)), tmp_path / "a.parquet")
    reader = TableReader(tmp_path / "a.parquet")
    assert reader[0]["json"] == rows[0]
    assert reader[1]["json"] == {"texts": ["t", None], "images": [None, {"bytes": b"x"}]}


def _union(rows: list[dict[str, Any]]) -> pa.Schema:
    schemas = [pa.Table.from_pylist([row]).schema for row in rows]
    return pa.unify_schemas(schemas)


def test_broken_files_and_missing_splits_are_refused(
    written: Callable[[str], Path], make: MakeLoader, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more PAR1")
    with pytest.raises(BadInput, match=r"broken\.parquet cannot be read as a table"):
        make(tmp_path / "broken.parquet")
    with pytest.raises(BadInput, match="splits test, train, but none for val"):
        make(written("saved_dict"), split="val")
    with pytest.raises(BadInput, match="of other splits, but none for test"):
        make(written("shards"), split="test")
    assert len(TableReader(tmp_path / "hub", "val")) == 1
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(BadInput, match="is empty"):
        make(tmp_path / "none.parquet")
    monkeypatch.setattr("mcore_qwen3vl.machine.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"needs the package pyarrow: pip install .*\[data\]"):
        make(tmp_path / "dict")


@pytest.mark.parametrize("name", TABLES)
def test_bad_rows_are_counted_and_named(name: str, written: Callable[[str], Path], processor: Any,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    bad = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    monkeypatch.setattr(writers, "RECORDS", [*RECORDS[:20], bad, *RECORDS[21:]])
    report = check_data(written(name), processor, DataConfig(4096, packing=True))
    assert (len(report.tokens), len(report.bad)) == (COUNT - 1, 1)
    assert report.bad[0].reason == "message 2, an assistant turn, is empty."
    place = {"parquet_of_bytes": "data.parquet[21]", "saved": "data-00001-of-00003.arrow[6]"}
    wanted = place.get(name) or {"saved_dict": ".arrow[21]", "shards": ".parquet[21]"}[name]
    assert report.bad[0].sample.endswith(wanted)
    assert report.formats == {"messages": COUNT - 1}
