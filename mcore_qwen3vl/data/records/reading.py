"""How the records of a data set are read: hook, format, system prompt, turns, weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from math import inf, isfinite
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.errors import BadInput

GROUP = "mcore_qwen3vl.preprocess"
"""The group of entry points under which packages register hooks."""

Hook = Callable[[Any], Any]
"""A user's function from a record of any kind to a record in a known format."""


@dataclass(frozen=True)
class Reading:
    """How the records of one data set are read. It is picklable, because the hook is a name."""

    preprocess: str | None = None
    """Hook that turns a record into one of a known format: ``module:function``, or the name of an
    entry point."""
    format: str | None = None
    """The records' format, a name of ``FORMATS``; None: recognised by their keys."""
    system: str | None = None
    """System prompt for conversations that have none."""
    train_on: str = "all"
    """Assistant turns to train on: ``all``, ``last``, or a regular expression that must match in
    the turn."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.train_on)
        except re.error as error:
            raise BadInput(
                f"train_on is {self.train_on!r}: neither all nor last, nor a regular expression "
                f"({error})."
            ) from error

    def instructed(self, messages: list[Any]) -> list[Any]:
        """Add the data set's system prompt to messages that have none."""
        first = messages[0] if messages else None
        if self.system is None or (isinstance(first, Mapping) and first.get("role") == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


PLAIN = Reading()
"""Records are read as they are."""


def preprocessed(record: Any, reading: Reading) -> Mapping[str, Any]:
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
    """Return a hook by its name: ``module:function``, or an entry point of :data:`GROUP`.

    Raises:
        BadInput: the hook cannot be imported, or is not a function.
    """
    module, colon, function = name.partition(":")
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    try:
        if entry is not None:
            found = entry.load()
        elif colon:
            found = getattr(importlib.import_module(module), function)
        else:
            raise ImportError("no installed package has an entry point of this name")
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"The hook {name!r} cannot be imported: {error}. Name it module:function, with the "
            "module on PYTHONPATH."
        ) from error
    if not callable(found):
        raise BadInput(f"The hook {name!r} is a {type(found).__name__}, not a function.")
    return found


class Observed(Mapping[str, Any]):
    """A record that remembers which of its keys were read."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._read: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys that were not read."""
        return tuple(str(key) for key in self._record if key not in self._read)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def observed[P](
    record: Mapping[str, Any], format: str, read: Callable[[Mapping[str, Any]], P]
) -> P:
    """Return what `read` makes of a record, with the format's name and the keys not read."""
    seen = Observed(record)
    parsed: Any = read(seen)
    made: P = replace(parsed, format=format, unread=(*seen.unread, *parsed.unread))
    return made


def number(name: str, value: Any, *, above: float = -inf, least: float = -inf) -> float:
    """Return a value that is a finite number, `above` one number and at `least` another."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not fits or value <= above or value < least:
        limits = (f" above {above:g}", above), (f" of at least {least:g}", least)
        wanted = next((said for said, limit in limits if limit > -inf), "")
        raise BadSample(f"{name} is {value!r:.40}; a number{wanted} is needed.")
    return float(value)


def weight_of(holder: Mapping[str, Any], key: str = "weight") -> float:
    """Return the weight of a record or a message: ``weight``, or ms-swift's ``loss``; default 1."""
    weight = holder.get(key)
    if weight is None:
        return 1.0
    if key == "loss" and isinstance(weight, bool):
        return float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        switch = "true, false or " if key == "loss" else ""
        quoted = ", without quotes" if isinstance(weight, str) else ""
        raise BadSample(
            f"{key} is {weight!r:.40}: it takes {switch}a number from 0 to 1e6{quoted}."
        )
    return float(weight)
