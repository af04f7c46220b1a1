"""A file of records, written again: those that pass a check, or one record a trained turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.places import sample_id
from mcore_qwen3vl.data.records.messages import records_of_turns
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.json_and_yaml import parse_json


@contextmanager
def clean_writer(
    out: Path, data: Path, flag: str = "--write-clean"
) -> Iterator[Callable[[bytes], object]]:
    """Write records to a file, which appears complete at the end, or not at all if it is empty.

    Yields:
        A function that takes the JSON of a record and writes it.

    Raises:
        BadInput: `data` is another kind of data set; or `out` exists, is not a JSONL file, is in
            another folder than `data`, or cannot be written.
    """
    if data.suffix not in (".jsonl", ".json") or not data.is_file():
        raise BadInput(f"{flag} takes the records of a .jsonl or .json file, not {data}.")
    if out.suffix != ".jsonl":
        raise BadInput(f"{flag} {out}: it writes one record a line; name a .jsonl file.")
    if out.exists():
        raise BadInput(f"{flag} {out}: that exists already; name another file.")
    if out.absolute().parent.resolve() != data.absolute().parent.resolve():
        raise BadInput(
            f"{flag} {out}: records name images relative to their own file, so name one in "
            f"the folder of {data}."
        )
    with atomic_write(out) as partial, partial.open("wb") as lines:
        yield lambda record: lines.write(_on_one_line(record))
    if not out.stat().st_size:
        out.unlink()


def write_turns(data: Path, out: Path) -> tuple[int, int]:
    """Write a record for each trained turn of a file's conversations, see :func:`records_of_turns`.

    Returns:
        The numbers of records read and written.

    Raises:
        BadInput: see :func:`clean_writer`; or a record is malformed.
    """
    read = written = 0
    with clean_writer(out, data, "--out") as write:
        for crude in CrudeSamples(parse_sources([str(data)]), split="train", trust=False):
            read += 1
            try:
                records = records_of_turns(parse_json(crude["json"], unique=True))
            except (BadSample, ValueError) as error:
                raise BadInput(f"{sample_id(crude)}: {error}") from error
            for record in records:
                write(_as_json(record))
            written += len(records)
    return read, written


def _on_one_line(record: bytes) -> bytes:
    """Return JSON text on one line; text that is on one line already keeps its bytes."""
    text = record.strip()
    if b"\n" in text:
        text = _as_json(json.loads(text))
    return text + b"\n"


def _as_json(record: Any) -> bytes:
    """Return a record as JSON: in UTF-8, unless a text has half of a surrogate pair."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()
