"""Errors about a command line, as one line each with a hint."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from difflib import get_close_matches
from typing import NoReturn

from mcore_qwen3vl.errors import BadInput

_UNKNOWN = "unrecognized arguments: "  # argparse's message begins so
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
"""Flags of other trainers and of our other commands, with the training flag for each."""
_SIMILAR = 0.75  # of 1; a less similar flag is rarely the one meant


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise ``BadInput`` and suggest known flags: the ``error`` method of a parser."""
    if message.startswith(_UNKNOWN):
        refuse_unknown(message.removeprefix(_UNKNOWN).split(), parser._option_string_actions)
    raise BadInput(f"{message}. {_HELP}")


def refuse_unknown(words: Collection[str], known: Collection[str]) -> NoReturn:
    """Refuse unknown arguments, and suggest the flags that misspelt ones may mean.

    Raises:
        BadInput: always.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    close = list(dict.fromkeys(meant for flag in flags for meant in _meant(flag, known)))
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise BadInput(f"{_UNKNOWN}{' '.join(words)}.{meant} {_HELP}")


def _meant(flag: str, known: Collection[str]) -> list[str]:
    """Return the flags that `flag` may stand for, the likeliest first."""
    if flag in _ELSEWHERE:
        return [_ELSEWHERE[flag]]
    alike = get_close_matches(flag, [*_ELSEWHERE, *known], 2, _SIMILAR)
    return [_ELSEWHERE.get(name, name) for name in alike]


class StrictParser(argparse.ArgumentParser):
    """An argument parser that raises ``BadInput`` instead of exiting."""

    error = refuse
