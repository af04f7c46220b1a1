"""Quick checks of a command line, which need no torch, no megatron and no ranks.

``mcore-qwen3vl train`` runs them before it starts ranks, launch scripts run them with
``python -m`` of this module, and every rank runs them before it imports megatron, which takes
seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.hf import processor_files
from mcore_qwen3vl.converters.hf.hub import SMALL
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.checks import check_surroundings, check_writable
from mcore_qwen3vl.training.arguments.help import asked_words
from mcore_qwen3vl.training.arguments.layout import check_layout_flags
from mcore_qwen3vl.training.arguments.parser import add_arguments, hf_model_of
from mcore_qwen3vl.training.arguments.refusal import StrictParser, refuse_unknown
from mcore_qwen3vl.training.lora.flags import check_targets
from mcore_qwen3vl.untrusted import refuse_links_out

_TEXTS = (
    "--load", "--pretrained-checkpoint", "--save", "--tensorboard-dir", "--wandb-project",
    "--wandb-exp-name", "--wandb-save-dir",
)  # fmt: skip
_NUMBERS = ("--train-iters", "--train-samples", "--ckpt-step")
_LISTS = ("--data-path", "--train-data-path", "--valid-data-path")


def check_early(argv: Sequence[str]) -> Architecture:
    """Refuse a command line with which no run can start.

    Returns:
        The model's shape.

    Raises:
        BadInput: a flag is unknown or missing or has an invalid value; or the model, the data or
            the folder to save to cannot be used.
    """
    check_names(argv)
    args = _arguments(argv)
    check_surroundings(args)
    model = hf_model_of(argv)
    architecture = Architecture.from_hf(model)
    processor_files.require(model)
    check_targets(args, architecture)
    targets = [Path(folder) for folder in (args.save, args.save_hf) if folder]
    if targets and os.environ.get("RANK", "0") == "0":
        for folder in targets:
            check_writable(folder)
        refuse_links_out((file for glob in SMALL for file in model.glob(glob)), model)
    return architecture


def check_names(argv: Sequence[str]) -> None:
    """Refuse flags that neither we nor the installed Megatron know.

    Does nothing for a Megatron version whose flags are not listed here: its own parser decides.

    Raises:
        BadInput: a flag is unknown.
    """
    listed = flag_list(version("megatron-core"))
    if not listed.exists():
        return
    own = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    known = {*own, *listed.read_text(encoding="utf-8").split()}
    flags = (word for word in argv if word.startswith("--"))
    unknown = [flag for flag in flags if flag.partition("=")[0] not in known]
    if unknown:
        refuse_unknown(unknown, known)


def flag_list(megatron: str) -> Path:
    """Return the file of a megatron-core version's flags, one per line; it may not exist."""
    return Path(__file__).with_name(f"megatron-core-{megatron}.txt")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse our flags and the Megatron flags that :func:`check_surroundings` reads."""
    parser = StrictParser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    # Not an error of its own, so that it is reported together with other missing flags.
    parser._option_string_actions["--hf-model"].required = False
    for flag in _TEXTS:
        parser.add_argument(flag)
    for flag in _NUMBERS:
        parser.add_argument(flag, type=int)
    for flag in _LISTS:
        parser.add_argument(flag, nargs="*")
    parser.add_argument("--skip-train", action="store_true")
    return parser.parse_known_args(list(argv))[0]


if __name__ == "__main__":
    flags = sys.argv[1:]
    try:
        if asked_words(flags) is None:
            check_layout_flags(flags, check_early(flags), int(os.environ["WORLD_SIZE"]))
    except BadInput as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
