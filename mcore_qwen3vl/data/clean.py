"""A JSONL file with the usable records of a data set, in the same folder as that data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_qwen3vl.atomic import atomic_write
from mcore_qwen3vl.errors import BadInput


@contextmanager
def clean_file(out: Path, data: Path) -> Iterator[Callable[[Any], object]]:
    """Write records to a file, which appears complete at the end, or not at all if it is empty.

    Args:
        out: JSONL file to write.
        data: ``.jsonl`` or ``.json`` file that the records come from.

    Yields:
        A function that takes a crude sample and writes its record.

    Raises:
        BadInput: `data` is another kind of data set; or `out` exists, is not a JSONL file, is in
            another folder than `data`, or cannot be written.
    """
    if data.suffix not in (".jsonl", ".json") or not data.is_file():
        raise BadInput(f"--write-clean takes the records of a .jsonl or .json file, not {data}.")
    if out.suffix != ".jsonl":
        raise BadInput(f"--write-clean {out}: it writes one record a line; name a .jsonl file.")
    if out.exists():
        raise BadInput(f"--write-clean {out}: that exists already; name another file.")
    if out.absolute().parent.resolve() != data.absolute().parent.resolve():
        raise BadInput(
            f"--write-clean {out}: records name images relative to their own file, so name one in "
            f"the folder of {data}."
        )
    with atomic_write(out) as partial, partial.open("wb") as lines:
        yield lambda sample: lines.write(_line(sample["json"]))
    if not out.stat().st_size:
        out.unlink()


def _line(record: bytes) -> bytes:
    """Return JSON text on one line; text that is on one line already keeps its bytes."""
    text = record.strip()
    if b"\n" in text:
        text = json.dumps(json.loads(text), ensure_ascii=False).encode()
    return text + b"\n"
