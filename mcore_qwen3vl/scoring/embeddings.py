"""The files of embeddings, which are made from the finished lines of JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 1024  # of a row group


def values_in(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values `key` of a line's texts, by the texts' names; empty if it has none."""
    return {
        name: part[key] for name, part in entry.items() if isinstance(part, Mapping) and key in part
    }


def write_parquet(lines: Path, out: Path) -> None:
    """Write one row for each text, in the order of the records; one with ``error`` for bad records.

    Args:
        lines: the lines of JSON, each a record.
        out: file to write, with the columns ``file``, ``line``, ``record``, ``text`` (the text's
            name in its record), ``embedding`` (float32 values, of length 1) and ``error``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = {"file": pa.string(), "line": pa.int64(), "record": pa.int64()}
    rest = {"text": pa.string(), "embedding": pa.list_(pa.float32()), "error": pa.string()}
    schema = pa.schema({**place, **rest})
    with pq.ParquetWriter(out, schema) as writer:
        for rows in batched(_rows(lines), _ROWS):
            writer.write_table(pa.Table.from_pylist(list(rows), schema))


def write_npy(lines: Path, out: Path) -> None:
    """Write an array (rows, H) float32 with the rows of `write_parquet`; NaN for bad records."""
    count = width = 0
    for row in _rows(lines):  # NumPy's file begins with the shape
        count, width = count + 1, max(width, len(row.get("embedding", ())))
    array = np.lib.format.open_memmap(out, "w+", np.dtype("<f4"), (count, width))
    for number, row in enumerate(_rows(lines)):
        array[number] = row.get("embedding", np.nan)
    array.flush()


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    with lines.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            texts = values_in(entry, "embedding")
            if not texts:
                yield entry
            for name, encoded in texts.items():
                values = np.frombuffer(base64.b64decode(encoded), "<f4")
                yield {**entry, "text": name, "embedding": values}
