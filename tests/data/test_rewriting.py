"""Records that pass a check are written again, a record a line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.data.conftest import WriteJsonl, question
from tests.data.test_inspection import check


def test_usable_records_are_written(
    dense: Path, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [question(i, image=False, words=3) for i in range(3)]
    long = question(0, image=False, words=200)
    path = write_jsonl([good[0], "{broken", "", good[1], {"prompt": "a"}, long, good[2]])
    clean = path.with_name("clean.jsonl")
    assert check(path, dense, "--write-clean", str(clean)) == 0
    printed = capsys.readouterr().out
    assert "data.jsonl:2: ValueError: no valid JSON" in printed
    assert "data.jsonl:5: the record has the keys prompt; none of" in printed
    assert "rewrites them: --preprocess MODULE:FUNCTION" in printed
    assert re.search(r"data\.jsonl:6: \d{3} tokens, more than seq_length 200\.", printed)
    assert f"3 usable records in {clean}" in printed
    assert [json.loads(line) for line in clean.read_text().splitlines()] == good
    assert check(path, dense, "--json") == 1
    totals = json.loads(capsys.readouterr().out)["summary"]
    assert (totals["samples"], totals["usable"], totals["bad"], totals["overlong"]) == (6, 3, 2, 1)
    assert totals["tokens"] > totals["trained_tokens"] > 0

    before = path.read_bytes()
    assert check(path, dense, "--write-clean", str(path)) == 2
    assert "that exists already" in capsys.readouterr().err
    assert check(path, dense, "--write-clean", str(dense / "clean.jsonl")) == 2
    assert check(path, dense, "--write-clean", str(clean), "--limit", "1") == 2
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".clean*"))


def test_an_array_is_written_a_record_a_line_and_nothing_where_none_is_usable(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = question(0, image=False, words=3)
    array, clean = tmp_path / "array.json", tmp_path / "clean.jsonl"
    array.write_text(json.dumps([good, {"prompt": 1}, good], indent=2))
    assert check(array, dense, "--write-clean", str(clean)) == 0
    assert [json.loads(line) for line in clean.read_text().splitlines()] == [good, good]
    array.write_text(json.dumps([question(0, image=False, words=200)]))
    none = tmp_path / "none.jsonl"
    assert check(array, dense, "--write-clean", str(none)) == 1
    assert "all 1 are longer than 200 tokens; raise" in capsys.readouterr().err
    array.write_text(json.dumps([{"prompt": 1}]))
    assert check(array, dense, "--write-clean", str(none)) == 1
    assert "is usable: all are bad." in capsys.readouterr().err
    array.write_text(json.dumps([{"prompt": 1}, question(0, image=False, words=200)]))
    assert check(array, dense, "--write-clean", str(none)) == 1
    assert "is usable: 1 are bad, and 1 are longer than 200 tokens" in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("*none*")} == set()
