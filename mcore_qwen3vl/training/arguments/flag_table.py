"""Flags from tables, each by its usage: ``{"--lr X": "learning rate"}``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

_INTEGERS, _NUMBER, _MANY = ("N", "K", "R", "TOKENS"), "X", "..."


def add_flags(group: argparse._ArgumentGroup, flags: Mapping[str, str], **defaults: object) -> None:
    """Add flags to `group`.

    Args:
        group: a group of the parser.
        flags: help by usage: ``--switch``, ``--count N``, ``--share X``, ``--file FILE`` or any
            other text, ``--kind one|other``, ``--names NAME...``; ``--new,--old N`` has two names.
        defaults: default by ``dest`` name; else None, or False of a switch.
    """
    for usage, text in flags.items():
        named, _, value = usage.partition(" ")
        names = named.split(",")
        if not value:
            group.add_argument(*names, action="store_true", help=text)
            continue
        shape: dict[str, Any] = {"metavar": value.removesuffix(_MANY)}
        if value.endswith(_MANY):
            shape["nargs"] = "+"
        if "|" in value:
            shape = {"choices": value.split("|")}
        elif shape["metavar"] in _INTEGERS:
            shape["type"] = int
        elif shape["metavar"] == _NUMBER:
            shape["type"] = float
        default = defaults.get(names[0].lstrip("-").replace("-", "_"))
        group.add_argument(*names, default=default, help=text, **shape)
