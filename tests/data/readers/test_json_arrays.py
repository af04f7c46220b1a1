"""An array of JSON is indexed, or refused with the place where it is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_qwen3vl.data.readers import json_arrays
from mcore_qwen3vl.errors import BadInput
from tests.data.loaders import MakeLoader


@pytest.mark.parametrize("window", [50, 1000, 1 << 24])
@pytest.mark.parametrize("indent", [None, 3])
def test_an_array_is_indexed_whatever_its_strings_hold(
    window: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_arrays, "_WINDOW", window)
    records = [{"id": i, "text": 'é]}[{",\\ 語' * (i % 7)} for i in range(60)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
    json_arrays.write_index(path, path)
    reader = json_arrays.JsonReader(path, json_arrays.index_of(path))
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
    assert not json_arrays.index_of(tmp_path / "a.json").exists()
