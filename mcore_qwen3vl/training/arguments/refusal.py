"""A parser's complaints about a command line, as one line of ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput

_UNKNOWN = "unrecognized arguments: "  # as argparse begins
_HELP = "mcore-qwen3vl train --help WORD shows the flags about a word."
_ELSEWHERE = {
    "--batch-size": "--global-batch-size",
    "--cp": "--context-parallel-size",
    "--dryrun": "--dry-run (of a launch script)",
    "--ep": "--expert-model-parallel-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--learning-rate": "--lr",
    "--lora-r": "--lora-rank",
    "--max-length": "--seq-length",
    "--max-steps": "--train-iters",
    "--model": "--hf-model",
    "--output-dir": "--save",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--pp": "--pipeline-model-parallel-size",
    "--sp": "--sequence-parallel",
    "--tp": "--tensor-model-parallel-size",
    "--warmup-steps": "--lr-warmup-iters",
}
"""Flags of other trainers, and of our other commands, with what they are called in training."""
_SIMILAR = 0.75  # of 1; less alike is rarely what was meant


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
    close = list(dict.fromkeys(meant for flag in flags for meant in _meant(flag, known)))
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise BadInput(f"{_UNKNOWN}{' '.join(words)}.{meant} {_HELP}")


def _meant(flag: str, known: Collection[str]) -> list[str]:
    """The flags that `flag` may stand for, the likeliest first."""
    if flag in _ELSEWHERE:
        return [_ELSEWHERE[flag]]
    alike = get_close_matches(flag, [*_ELSEWHERE, *known], 2, _SIMILAR)
    return [_ELSEWHERE.get(name, name) for name in alike]


class StrictParser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        refuse_by(self)(message)
