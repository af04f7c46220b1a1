"""Scores are read only where the facts beside them are those of the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.indexes import ensure_index
from mcore_qwen3vl.data.scores import (
    facts_file_of,
    file_digest,
    other_tokens_error,
    require_facts,
    scores_file_of,
)
from mcore_qwen3vl.errors import BadInput


def written(folder: Path, **changes: Any) -> Path:
    """Write data of two records, their scores, and the facts of these with `changes`."""
    data = folder / "data.jsonl"
    data.write_text('{"text": "0"}\n\n{"text": "1"}\n')
    scores_file_of(data).touch()
    settings = {"data": file_digest(data), "temperature": 1.0, "top_k": 3} | changes
    facts_file_of(scores_file_of(data)).write_text(json.dumps({"settings": settings}))
    return data


def facts(data: Path) -> dict[str, Any]:
    return require_facts(scores_file_of(data), data, "score it", other_remedy=" or another")


def test_the_facts_of_the_data_are_returned(tmp_path: Path) -> None:
    assert facts(written(tmp_path))["top_k"] == 3


def unlink_scores(data: Path) -> None:
    scores_file_of(data).unlink()


def unlink_facts(data: Path) -> None:
    facts_file_of(scores_file_of(data)).unlink()


def change_data(data: Path) -> None:
    data.write_text(data.read_text().replace("1", "2"))


@pytest.mark.parametrize(
    ("harm", "changes", "message"),
    [
        (unlink_scores, {}, r"does not exist\. Let the model score .*/data\.jsonl with `score it`"),
        (unlink_facts, {}, r"data\.scores\.json, which belongs to .* cannot be read"),
        (None, {"temperature": 2.0}, "made with temperature 2, and 1 is needed"),
        (change_data, {}, "was not made from the current content"),
    ],
)
def test_scores_of_something_else_are_refused(
    harm: Callable[[Path], None] | None, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = written(tmp_path, **changes)
    if harm is not None:
        harm(data)
    with pytest.raises(BadInput, match=message):
        facts(data)


def test_scores_lie_beside_lines_alone(tmp_path: Path) -> None:
    data = written(tmp_path).rename(tmp_path / "data.json")
    with pytest.raises(BadInput, match=r"is not a JSONL file.*use JSONL data or another\.$"):
        facts(data)


def test_the_line_of_other_tokens_is_named(tmp_path: Path) -> None:
    data = written(tmp_path)
    ensure_index(data)
    error = other_tokens_error(data, 1, scores_file_of(data))
    assert f"{data}:3 no longer has the tokens that it had when" in str(error)
