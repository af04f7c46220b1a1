"""The arguments that a command line sets, and a check that none contradicts the model's config."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_qwen3vl.errors import BadInput


def explicit_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that `argv` itself sets, by ``dest`` name, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    explicit = vars(parser.parse_known_args(list(argv))[0])
    for action, default in defaults:
        action.default = default
    return explicit


def check_explicit(
    parser: argparse.ArgumentParser, explicit: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse flags that contradict the checkpoint's config.

    Args:
        parser: knows the flag of each argument.
        explicit: the arguments that the command line sets (:func:`explicit_arguments`).
        fixed: the arguments that the config sets; another value would be another model.

    Raises:
        BadInput: flags contradict the config; the message names each, its value and the config's.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.dest}
    wrong = [
        f"{flags[name]} sets {name} to {explicit[name]}, the config says {value}"
        for name, value in fixed.items()
        if name in explicit and explicit[name] != value
    ]
    if wrong:
        raise BadInput(
            f"The command line contradicts the --hf-model config: {'; '.join(wrong)}. "
            "--hf-model supplies the architecture: leave these flags out."
        )
