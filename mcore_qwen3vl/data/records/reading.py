"""What a data set says of its records: a hook, their format, a system prompt, which turns count."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Reading:
    """How the records of one data set are read. Picklable: the hook is a name."""

    preprocess: str | None = None
    """``module:function``, or the name of an entry point, from a record to one of a known
    format."""
    format: str | None = None
    """Of its records, a name of ``FORMATS``; None: told by their keys."""
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
