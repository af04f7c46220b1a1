"""A file of embeddings has a row for each text, and one for a bad record."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from mcore_qwen3vl.scoring.records import tally, write_npy, write_parquet


def test_each_text_and_each_error_is_a_row(tmp_path: Path) -> None:
    values = np.array([[0.6, -0.8], [1.0, 0.0]], "<f4")
    query, positive = (
        {"embedding": base64.b64encode(row.tobytes()).decode(), "digest": "0"} for row in values
    )
    lines = tmp_path / "lines"
    entries = [{"line": 1, "query": query, "positive": positive}, {"line": 2, "error": "bad"}]
    lines.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    write_parquet(lines, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["line"], row["text"], row["error"]) for row in rows] == [
        (1, "query", None),
        (1, "positive", None),
        (2, None, "bad"),
    ]
    assert [row["embedding"] for row in rows[:2]] == values.tolist()
    write_npy(lines, tmp_path / "out.partial")
    array = np.load(tmp_path / "out.partial")
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, [*values, [np.nan, np.nan]])
    found = tally(lines)
    assert (found.scored, found.embeddings, found.bad, found.perplexity) == (1, 2, 1, None)
