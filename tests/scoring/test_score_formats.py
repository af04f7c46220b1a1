"""Every kind of data set gets the same scores, and every kind of file holds the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_qwen3vl.data import DataConfig, load_processor
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from tests.data.conftest import chat, write_png
from tests.data.writers import COUNT, OTHERS, QUICK, WRITERS
from tests.turns import slow_except

PLACE = ("file", "line", "record")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("formats")
    (folder / "media").mkdir()
    for index, (height, width) in enumerate([(24, 40), (50, 31), (64, 64), (17, 90)]):
        write_png(folder / "media" / f"{index}.png", height, width, seed=index)
    return lambda name: WRITERS[name](folder, folder / "media")


def scores(checkpoint: Path, data: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    options = {"dtype": "fp32", "seq_length": 512, "buffer": 8, **options}
    score(ScoreRequest(checkpoint, data, out, **options), on_cpu=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def of_jsonl(
    dense: Path, written: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return scores(dense, written("jsonl"), tmp_path_factory.mktemp("of_jsonl") / "out.jsonl")


def without_place(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in PLACE}


def places(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(entry[key] for key in PLACE if key in entry) for entry in entries]


FILES = {
    "saved": [(f"data-0000{i}-of-00003.arrow", n + 1) for i in range(3) for n in range(15)],
    "tars": [("0.tar", n + 1) for n in range(COUNT)],
    "shards": [
        (f"data/train-0000{i}-of-00002.parquet", n + 1) for i in range(2) for n in range(23 - i)
    ],
}


@pytest.mark.parametrize("name", slow_except(OTHERS, *QUICK))
def test_the_same_scores_from_every_kind_of_file(
    name: str,
    dense: Path,
    written: Callable[[str], Path],
    of_jsonl: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    found = scores(dense, written(name), tmp_path / "out.jsonl")
    assert [without_place(one) for one in found] == [without_place(one) for one in of_jsonl]
    assert all(one["tokens"] for one in found)
    if name in FILES:
        assert places(found) == FILES[name]
    elif name != "saved_dict":
        assert [one["record"] for one in found] == list(range(1, COUNT + 1))


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """Serve as a hook that makes a chat of a record."""
    return chat(("user", "Say it."), ("assistant", record["said"]))


def test_a_mixture_is_scored_one_data_set_after_the_other(
    dense: Path, written: Callable[[str], Path], of_jsonl: list[dict[str, Any]], tmp_path: Path
) -> None:
    """It is so whatever their weights, on two replicas, and each keeps its own settings."""
    table, lines = written("parquet_of_bytes"), tmp_path / "own.jsonl"
    lines.write_text('\n{"said": "Yes."}\n{"said": "No."}\n')
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(
        f"datasets:\n  - {{path: {table}, weight: 0.1, max_samples: 5}}\n"
        "  - {path: own.jsonl, weight: 7, preprocess: 'tests.scoring.test_score_formats:brief'}\n"
    )
    found = scores(dense, mixture, tmp_path / "out.jsonl", layout=Layout(dp=2), packing=False)
    assert places(found) == [
        *((os.path.relpath(table, tmp_path), n + 1) for n in range(5)),
        ("own.jsonl", 2),
        ("own.jsonl", 3),
    ]
    assert [one["token_ids"] for one in found[:5]] == [one["token_ids"] for one in of_jsonl[:5]]
    tokenizer = load_processor(dense).tokenizer
    assert "Yes." in tokenizer.decode(found[5]["token_ids"])
    assert "No." in tokenizer.decode(found[6]["token_ids"])


def test_a_bad_record_of_a_table_has_one_name(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data.parquet", tmp_path / "out.jsonl"
    good = chat(("user", "a"), ("assistant", "b"))
    pq.write_table(pa.Table.from_pylist([good, {"messages": []}, good]), data, row_group_size=1)
    found = scores(dense, data, out, max_bad_fraction=1)
    (flaw,) = check_data(data, load_processor(dense), DataConfig(512)).bad
    assert flaw.sample == f"{data}[2]"
    assert f"record {flaw.sample} left out: " in capfd.readouterr().err
    assert [(one["record"], "error" in one) for one in found] == [(1, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("changed", ["hooks", "hf_model"])
def test_what_was_begun_with_another_hook_or_template_is_not_continued(
    changed: str, dense: Path, tmp_path: Path
) -> None:
    from mcore_qwen3vl.scoring.score import _ScoringJob

    data, hook, hf = tmp_path / "data.jsonl", tmp_path / "hook.py", tmp_path / "hf"
    data.write_text(json.dumps(chat(("user", "a"), ("assistant", "b"))))
    hook.write_text("def f(record):\n    return record\n")
    shutil.copytree(dense, hf)
    request = ScoreRequest(dense, data, tmp_path / "out.jsonl", hf=hf, preprocess=f"{hook}:f")
    _ScoringJob(request).output.open()
    if changed == "hooks":
        hook.write_text("def f(record):\n    return {**record, 'weight': 1.0}\n")
    else:
        (hf / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(BadInput, match=rf"begun with other settings \({changed}\)"):
        score(request, on_cpu=True)


def test_what_was_begun_on_other_files_is_not_continued(dense: Path, tmp_path: Path) -> None:
    from mcore_qwen3vl.scoring.score import _ScoringJob

    data, out = tmp_path / "data.parquet", tmp_path / "out.jsonl"
    good = chat(("user", "a"), ("assistant", "b"))
    pq.write_table(pa.Table.from_pylist([good]), data)
    _ScoringJob(ScoreRequest(dense, data, out)).output.open()
    scores(dense, data, out, seq_length=None, buffer=128, dtype="config")
    out.unlink()
    _ScoringJob(ScoreRequest(dense, data, out)).output.open()
    pq.write_table(pa.Table.from_pylist([good, good]), data)
    with pytest.raises(BadInput, match=r"begun with other settings \(data\)"):
        score(ScoreRequest(dense, data, out), on_cpu=True)
