"""A parser's complaints about a command line, as one line of ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput


def refuse_by(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    """An error of `parser` as ours, with the flags that a misspelt one may mean."""

    def refuse(message: str) -> NoReturn:
        meant = ""
        if message.startswith("unrecognized arguments"):
            flags = list(parser._option_string_actions)
            unknown = [word for word in message.split() if word.startswith("--")]
            close = [f for word in unknown for f in get_close_matches(word, flags, n=2)]
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise BadInput(
            f"{message}.{meant} mcore-qwen3vl train --help WORD shows the flags about a word."
        )

    return refuse


class StrictParser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        refuse_by(self)(message)
