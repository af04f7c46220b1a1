"""None"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig, parse_sources
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import question
from tests.data.loaders import PACKED, MakeLoader


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"packing": True, "micro_batch_size": 2}, "packed micro-batch is one"),
        ({"packing": True, "pad_to_longest": True}, "no meaning with --packing"),
        ({"length_multiple": 3}, "not a multiple of 3"),
        ({"micro_batch_size": 0}, "must be positive"),
        ({"overlong": "cut"}, "'drop' or 'truncate'"),
        ({"max_bad_fraction": 2.0}, "a share"),
    ],
)
def test_contradictory_settings_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        DataConfig(**{"seq_length": 256, **config})


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
