"""The same samples in every kind of file are read, resumed, blended and refused alike."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from datasets.utils.logging import disable_progress_bar

from mcore_qwen3vl.data import DataConfig, parse_sources, readers
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.readers import TableReader
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import question, write_tar
from tests.data.loading.conftest import PACKED, MakeLoader, same
from tests.turns import slow_except

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


@pytest.fixture
def written(tmp_path: Path, media: Path) -> Callable[[str], Path]:
    (tmp_path / "media").symlink_to(media)
    return lambda name: WRITERS[name](tmp_path, media)


OTHERS = [name for name in WRITERS if name != "jsonl"]
QUICK = ("array", "saved", "tars")
"""Kinds of files that stand for the others where time is short."""


@pytest.mark.parametrize("name", slow_except(OTHERS, *QUICK))
def test_the_same_batches_from_every_kind_of_file(
    name: str, written: Callable[[str], Path], make: MakeLoader
) -> None:
    plain, other = make(written("jsonl")), make(written(name))
    for _ in range(COUNT + 2):
        ours, theirs = next(other), next(plain)
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.loss_weights, theirs.loss_weights)
        assert (ours.visual is None) == (theirs.visual is None)
        if ours.visual is not None:
            assert torch.equal(ours.visual.pixel_values, theirs.visual.pixel_values)


BALANCED = replace(PACKED, balance=True, micro_batches=2)
CONFIGS = {"plain": PACKED, "balanced": BALANCED}
RESUMED = [(config, name) for config in CONFIGS for name in WRITERS]


@pytest.mark.parametrize(
    ("config", "name"),
    slow_except(RESUMED, ("plain", "array"), ("plain", "saved"), ("balanced", "tars")),
)
def test_stopped_and_resumed_the_batches_are_the_same_bitwise(
    name: str, config: str, written: Callable[[str], Path], make: MakeLoader,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = written(name)
    options = {"config": CONFIGS[config], "dp_rank": 1, "dp_size": 2}
    uninterrupted = make(path, **options)
    for _ in range(4):
        next(uninterrupted)
    torch.save(uninterrupted.state_dict(), tmp_path / "state.pt")
    resumed = make(path, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(6):
        assert same(next(resumed), next(uninterrupted))


def test_a_state_from_before_records_had_an_order_resumes_tars(
    written: Callable[[str], Path], make: MakeLoader
) -> None:
    """Such a state names neither the order nor the rows of a micro-batch nor the start."""
    path = written("tars")
    uninterrupted, resumed = (make(path, config=CONFIGS["plain"]) for _ in range(2))
    for _ in range(4):
        next(uninterrupted)
    state = uninterrupted.state_dict()
    resumed.load_state_dict({k: state[k] for k in state.keys() - {"order", "rows", "start"}})
    for _ in range(6):
        assert same(next(resumed), next(uninterrupted))


@pytest.mark.slow  # data workers
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_resumed_with_workers(
    name: str, config: DataConfig, written: Callable[[str], Path], make: MakeLoader
) -> None:
    path = written(name)
    options = {"config": config, "dp_rank": 0, "dp_size": 2, "num_workers": 2}
    uninterrupted = make(path, **options)
    for _ in range(5):
        next(uninterrupted)
    state = uninterrupted.state_dict()
    resumed = make(path, **options)
    resumed.load_state_dict(state)
    for _ in range(5):
        assert same(next(resumed), next(uninterrupted))


def test_a_table_is_read_by_parts_in_any_order(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading forwards decodes a batch once; going back decodes its row group again."""
    monkeypatch.setattr(readers, "_BATCH", 4)
    monkeypatch.setattr(readers, "_KEPT", 2)
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
    monkeypatch.setattr(readers, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(readers, "_KEPT_BYTES", 3 << 20)
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
    found = [b.column("a").to_pylist() for b in readers._rebatch(iter(batches), 4)]
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


@pytest.mark.parametrize("window", [50, 1000, 1 << 24])
@pytest.mark.parametrize("indent", [None, 3])
def test_an_array_is_indexed_whatever_its_strings_hold(
    window: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_WINDOW", window)
    records = [{"id": i, "text": 'é]}[{",\\ 語' * (i % 7)} for i in range(60)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
    readers.write_index(path, path)
    reader = readers.JsonReader(path, readers.index_of(path))
    assert [json.loads(reader[i]["json"]) for i in range(len(reader))] == records


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[]", "is empty"),
        ("true", "neither a JSON array nor one JSON object a line"),
        ('[{"a": 1} {"a": 2}]', "record 2, from line 1: ',' is expected"),
        ('[\n{"a": 1},\n{"a": }\n]', "record 2, from line 3: Expecting value"),
        ('[{"a": 1},', "record 2, from line 1: Expecting value"),
        ('[{"a": 1}', "record 1, from line 1: the file ends within the array"),
    ],
)
def test_a_broken_array_is_refused_with_its_place(
    text: str, said: str, make: MakeLoader, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadInput, match=said):
        make(tmp_path / "a.json")
    assert not readers.index_of(tmp_path / "a.json").exists()


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
    monkeypatch.setitem(globals(), "RECORDS", [*RECORDS[:20], bad, *RECORDS[21:]])
    report = check_data(written(name), processor, DataConfig(4096, packing=True))
    assert (len(report.tokens), len(report.bad)) == (COUNT - 1, 1)
    assert report.bad[0].reason == "message 2, an assistant turn, is empty."
    place = {"parquet_of_bytes": "data.parquet[21]", "saved": "data-00001-of-00003.arrow[6]"}
    wanted = place.get(name) or {"saved_dict": ".arrow[21]", "shards": ".parquet[21]"}[name]
    assert report.bad[0].sample.endswith(wanted)
    assert report.formats == {"messages": COUNT - 1}


def test_kinds_of_files_blend(written: Callable[[str], Path], make: MakeLoader) -> None:
    sources = parse_sources(["3", str(written("array")), "1", str(written("saved"))])
    stream = make(*sources)
    files = Counter("json" if ".json[" in next(stream).names[0] else "hf" for _ in range(160))
    assert 98 < files["json"] < 142  # 120 expected, deviation 5.5


@pytest.fixture
def write_mixture(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str) -> Path:
        (tmp_path / "mixture.yaml").write_text(text)
        return tmp_path / "mixture.yaml"

    return write


def test_a_mixture_says_everything_of_its_data_sets(
    written: Callable[[str], Path], make: MakeLoader,
    write_mixture: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    big = [{**question(i), "images": ["2.png"]} for i in range(1, 8)]
    (elsewhere / "b.jsonl").write_text("\n".join(map(json.dumps, big)))
    written("saved")
    mixture = write_mixture(
        "datasets:\n"
        "  - {path: saved, epochs: 2, max_samples: 6}\n"
        "  - {path: elsewhere/b.jsonl, epochs: 1, media: media, system: Look., train_on: last,\n"
        "     image_max_tokens: 4}\n"
    )
    stream = make(*parse_sources([str(mixture)]))
    batches = [next(stream) for _ in range(2 * 6 + 7)]
    names = Counter(name.rsplit("/", 1)[-1] for batch in batches for name in batch.names)
    assert {name: c for name, c in names.items() if "arrow" in name} == {
        f"data-00000-of-00003.arrow[{i}]": 2 for i in range(1, 7)
    }
    assert {name: c for name, c in names.items() if "jsonl" in name} == {
        f"b.jsonl:{i}": 1 for i in range(1, 8)
    }
    patches = {"b.jsonl": set(), "arrow": set()}
    for batch in batches:
        kind = "b.jsonl" if "b.jsonl" in batch.names[0] else "arrow"
        patches[kind].add(batch.counts.patches)
    assert patches["b.jsonl"] == {16}  # four tokens, each of two by two patches
    assert max(patches["arrow"]) > 16


def test_max_samples_of_a_metadataset_is_refused_and_its_remedies_work(
    written: Callable[[str], Path], make: MakeLoader,
    write_mixture: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    name = written("jsonl").name
    blend = tmp_path / "blend.yaml"
    metadataset = (
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {{path: {name}{subset}}}\n"
    )
    blend.write_text(metadataset.format(name=name, subset=""))
    with pytest.raises(BadInput, match=r"max_samples is 6 for .*/blend\.yaml, .*subset:"):
        make(*parse_sources([str(write_mixture("datasets: [{path: blend.yaml, max_samples: 6}]"))]))
    blend.write_text(metadataset.format(name=name, subset=", subset: {range: [0, 6]}"))
    for entry in ("{path: blend.yaml}", f"{{path: {name}, max_samples: 6}}"):
        stream = make(*parse_sources([str(write_mixture(f"datasets: [{entry}]"))]))
        assert {next(stream).names[0].rsplit(":", 1)[1] for _ in range(12)} == set("123456")


@pytest.mark.parametrize("balance", [False, True])
def test_joined_webdatasets_are_refused(
    balance: bool, written: Callable[[str], Path], make: MakeLoader, tmp_path: Path
) -> None:
    name = written("tars").name
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    join:\n"
        f"      - {{path: {name}}}\n      - {{path: {name}}}\n"
        "    joiner: {__module__: megatron.energon, __class__: CaptioningSample}\n"
    )
    with pytest.raises(BadInput, match=r"blend\.yaml joins WebDatasets .*into one WebDataset"):
        make(*parse_sources([str(blend)]), config=replace(PACKED, balance=balance))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("datasets: []", "at least one"),
        ("datasets: [{weight: 1}]", "data set 1 must be an object with a path"),
        (
            "datasets: [{path: a, wieght: 1}]",
            "data set 1: unknown key 'wieght'; the known keys are path",
        ),
        ("datasets: [{path: a, weight: much}]", "weight is 'much'; float is needed"),
        ("datasets: [{path: a, weight: 0}]", "weight is 0; it must be above 0"),
        ("datasets: [{path: a, weight: .nan}]", "weight is nan; it must be above 0, and finite"),
        ("datasets: [{path: a}, {path: b, epochs: 2}]", "Some data sets have epochs and some"),
        ("datasets: [{path: a, epochs: 1, weight: 1}]", "has both weight and epochs"),
        ("datasets: [{path: a, format: csv}]", "format is 'csv'; the formats are messages"),
        ("datasets: [{path: a, train_on: '('}]", "neither all nor last"),
        ("datasets: [{path: a, preprocess: m:f, format: caption}]", "both preprocess and format"),
        ("datasets: [{path: a, max_samples: 1.5}]", "max_samples is 1.5; int is needed"),
        ("{datasets: [{path: a}], seed: 1}", "unknown key 'seed'; the only key is datasets"),
        ("datasets: [", "cannot be read as YAML"),
    ],
)
def test_a_malformed_mixture_is_refused(
    text: str, said: str, write_mixture: Callable[..., Path]
) -> None:
    with pytest.raises(BadInput, match=said):
        parse_sources([str(write_mixture(text))])
