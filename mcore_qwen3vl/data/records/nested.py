"""Values of a record that stand there in another form: as JSON text, or as a struct of lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.json_and_yaml import parse_json


@dataclass(frozen=True)
class NestedForm:
    """A list that may stand where text may stand too, and so may be JSON text there.

    Text that is an answer may be JSON of any kind. So only what has this form is taken for a list.
    """

    name: str
    is_met_by: Callable[[Any], bool]
    begins: re.Pattern[str] | None
    """The beginning of text that is meant as such a list, although it is no JSON."""
    literally: str
    """How text of this form is written that is meant as text."""

    def parse(self, value: Any, key: str) -> Any:
        """Return what the value of `key` stands for: the list, if it is that as JSON text.

        Raises:
            BadSample: the text begins as such a list does, and is no JSON.
        """
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            parsed = parse_json(value)
        except ValueError as error:
            if self.begins is None or not self.begins.match(value):
                return value
            raise BadSample(
                f"{key} is text that begins as a list of {self.name} does, but is not JSON: "
                f"{error}. Write the list, or JSON. Text that is meant as text is written as "
                f"{self.literally}."
            ) from error
        return parsed if self.is_met_by(parsed) else value


def parse_nested(value: Any, key: str) -> Any:
    """Return the value of `key`, parsed if it is text: tables keep nested values as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadSample(f"{key} is text, but not JSON: {error}.") from error


_OF_ROWS = ("role", "from", "function", "name")
"""Keys of messages and calls, which have a list in a struct of lists alone."""


def rows_of(value: Any, key: str) -> Any:
    """Return the list of objects that a struct of lists stands for; other values as they are.

    ``datasets`` keeps a list of objects so: ``{"role": ["user", ...], "content": ["Hi", ...]}``.
    """
    if not isinstance(value, Mapping) or not any(isinstance(value.get(k), list) for k in _OF_ROWS):
        return value
    columns = {name: column for name, column in value.items() if column is not None}
    if not all(isinstance(column, list) for column in columns.values()) or (
        len({len(column) for column in columns.values()}) > 1
    ):
        raise BadSample(f"{key} is a struct of lists, of which each must have the same length.")
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    return [{name: cell for name, cell in row if cell is not None} for row in rows]
