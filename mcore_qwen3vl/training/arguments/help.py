"""``--help [WORD...]`` of a training command: all flags by group, or those about a word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput

PROGRAM = "mcore-qwen3vl train [--processes N]"
ASKS = frozenset({"-h", "--help"})


def asked_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words after ``--help`` or ``-h`` in lower case; None if no help is asked for."""
    place = next((at for at, word in enumerate(argv) if word in ASKS), None)
    return None if place is None else [word.lower().lstrip("-") for word in argv[place + 1 :]]


def print_help(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Print the help for the flags whose name, text or group contains each of `words`.

    Raises:
        BadInput: there is no such flag.
    """
    for group in parser._action_groups:
        kept = [a for a in group._group_actions if _is_about(a, group.title or "", words)]
        group._group_actions = kept
        for action in kept:
            _make_printable(action)
    parser._action_groups = [group for group in parser._action_groups if group._group_actions]
    if not parser._action_groups:
        raise BadInput(f"No flag is about {' '.join(words)!r}: try another word, or a part of it.")
    if parser.usage is None:
        parser.usage = "%(prog)s --hf-model DIR --data-path PATH [FLAG...]"
    parser.print_help()


def print_megatron_help(words: Sequence[str] = ()) -> NoReturn:
    """Print Megatron's flags and ours with :func:`print_help`, and exit; imports megatron."""
    from megatron.training.arguments import add_megatron_arguments

    from mcore_qwen3vl.training.arguments.own_flags import add_arguments

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Qwen3-VL training. --help WORD shows the flags about a word.",
        allow_abbrev=False,
        add_help=False,
    )
    print_help(add_arguments(add_megatron_arguments(parser)), words)
    sys.exit(0)


def _is_about(action: argparse.Action, group: str, words: Sequence[str]) -> bool:
    texts = [*action.option_strings, action.dest.replace("_", "-"), action.help or "", group]
    text = " ".join(texts).lower()
    return all(word in text for word in words)


def _make_printable(action: argparse.Action) -> None:
    """Escape a bare ``%``, which some of Megatron's help texts have and argparse would format."""
    help = action.help or ""
    try:
        help % {**vars(action), "prog": "", "type": ""}
    except (ValueError, TypeError, KeyError):
        action.help = help.replace("%", "%%")
