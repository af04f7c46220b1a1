"""A user's function that rewrites the records of a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.functions import RULE, find_function

GROUP = "mcore_qwen3vl.preprocess"
"""The group of entry points under which packages register hooks."""

Hook = Callable[[Any], Any]
"""A user's function from a record of any kind to a record in a known format."""


def preprocess_record(record: Any, reading: Reading) -> Mapping[str, Any]:
    """Return the record as the data set's hook rewrites it.

    Raises:
        BadSample: the hook returned None, or the record is no JSON object. The hook's own
            exceptions pass through.
    """
    if reading.preprocess is not None:
        record = find_hook(reading.preprocess)(record)
        if record is None:
            raise BadSample(f"{reading.preprocess} returned None for it.")
    if not isinstance(record, Mapping):
        raise BadSample(f"a record must be a JSON object, this is {type(record).__name__}.")
    return record


@cache
def find_hook(name: str) -> Hook:
    """Return a hook by its name: an entry point of :data:`GROUP`, or see :mod:`.functions`.

    Raises:
        BadInput: the hook cannot be imported, or is not a function.
    """
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    if entry is None and ":" not in name:
        raise BadInput(
            f"--preprocess {name}: no installed package has registered a function of this name. "
            f"Name it {RULE}."
        )
    try:
        named = name if entry is None else f"{entry.module}:{entry.attr}"
        return find_function(named, "record")
    except BadInput as error:
        raise BadInput(f"--preprocess {error}") from error
