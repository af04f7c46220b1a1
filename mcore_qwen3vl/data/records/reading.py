"""What a data set says of its records: a hook, their format, a system prompt, which turns count."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from mcore_qwen3vl.errors import BadInput

GROUP = "mcore_qwen3vl.preprocess"
"""The group of entry points in which packages name their hooks."""

Hook = Callable[[Any], Any]
"""A function of the user's, from a record of any shape to one of a known format."""


@dataclass(frozen=True)
class Reading:
    """How the records of one data set are read. Picklable: the hook is a name."""

    preprocess: str | None = None
    """``module:function``, or the name of an entry point, from a record to one of a known
    format."""
    format: str | None = None
    """The format of its records, a name of ``FORMATS``; None: told by their keys."""
    system: str | None = None
    """System prompt of conversations that have none."""
    train_on: str = "all"
    """Assistant turns that are trained: ``all``, ``last``, or those that hold a match of this
    regular expression."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.train_on)
        except re.error as error:
            raise BadInput(
                f"train_on is {self.train_on!r}: neither all nor last, nor a regular expression "
                f"({error})."
            ) from error


@cache
def find_hook(name: str) -> Hook:
    """A function by its name, ``module:function``, or by that of an entry point of :data:`GROUP`.

    Raises:
        BadInput: there is none.
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
