"""A parser's complaints about a command line, as one line of ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput

_UNKNOWN = "unrecognized arguments: "  # as argparse begins
_HELP = "mcore-qwen3vl train --help WORD shows the flags about a word."


def refuse_by(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    """An error of `parser` as ours, with the flags that a misspelt one may mean."""

    def refuse(message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            refuse_unknown(message.removeprefix(_UNKNOWN).split(), parser._option_string_actions)
        raise BadInput(f"{message}. {_HELP}")

    return refuse


def refuse_unknown(words: Collection[str], known: Collection[str]) -> NoReturn:
    """
    Args:
        words: what no flag of a command line takes.
        known: all flags.

    Raises:
        BadInput: always; with the flags that the misspelt ones may mean.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    close = [found for flag in flags for found in get_close_matches(flag, known, n=2)]
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise BadInput(f"{_UNKNOWN}{' '.join(words)}.{meant} {_HELP}")


class StrictParser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        refuse_by(self)(message)
