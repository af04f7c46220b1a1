"""JSON and YAML, parsed or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files

MOST_VALUES = 1_000_000
"""Most values in a YAML file whose aliases are written out."""

_MOST_BITS = 1024  # YAML has integers in bases that Python writes no message of


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON.

    Raises:
        ValueError: `text` is not JSON, or is nested more deeply than Python can read; or with
            `unique` an object has a key twice, where Python would take the last value.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:  # whose line is that of `text`, not of a file
        raise ValueError(f"no valid JSON: {error.msg}, at character {error.pos + 1:,}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `pairs`; raise ValueError for a key with two values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        first: dict[str, Any] = {}
        for key, value in pairs:
            if first.setdefault(key, value) != value:
                raise ValueError(f"the key {key[:40]!r} comes twice, with other values: keep one")
    return made


def require_spelled_out(content: Any) -> Any:
    """Return what a YAML file holds, if it is not huge with each alias (``*name``) written out.

    A few lines of aliases of aliases stand for billions of values, and whoever walks through them,
    or prints them in a message, never ends.

    Raises:
        ValueError: it has more than `MOST_VALUES` values or a huge integer, or contains itself.
    """
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, list | dict):
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError("it has an integer of hundreds of digits")
            return 1
        if (known := sizes.get(id(value))) is not None:
            if not known:
                raise ValueError("it contains itself")
            return known
        sizes[id(value)] = 0  # not known yet
        parts = value if isinstance(value, list) else [*value, *value.values()]
        sizes[id(value)] = 1 + sum(map(size, parts))
        return sizes[id(value)]

    if size(content) > MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")
    return content


def read_object(path: Path, name: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a file, or in the file `name` of a directory.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    refuse_special_files(path)
    file = path / name if path.is_dir() else path
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist. {where}; check the path.") from None
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file} cannot be read as JSON: {error!s:.200}. Copy the file again."
        ) from None
    if not isinstance(content, dict):
        raise BadInput(
            f"{file} holds {type(content).__name__}, not a JSON object. Copy the file again."
        )
    return content


def read_object_or_empty(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, as :func:`read_object` does; empty if there is no file.

    A folder or a pipe of that name is no file: opening a pipe could wait for ever.
    """
    return read_object(file, file.name, "") if file.is_file() else {}
