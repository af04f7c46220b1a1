"""What can be said of a command line at once: without torch, megatron or a rank of the run.

``mcore-qwen3vl train`` asks before it starts ranks, launch scripts by ``python -m`` of this module,
and every rank of torchrun before it imports megatron, which takes seconds.
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
from mcore_qwen3vl.untrusted import refuse_links_out

_TEXTS = (
    "--load", "--pretrained-checkpoint", "--save", "--tensorboard-dir", "--wandb-project",
    "--wandb-exp-name", "--wandb-save-dir",
)  # fmt: skip
_NUMBERS = ("--train-iters", "--train-samples")
_LISTS = ("--data-path", "--train-data-path", "--valid-data-path")


def check_early(argv: Sequence[str]) -> Architecture:
    """Refuse a command line that no run can come of.

    Returns:
        The model's shape.

    Raises:
        BadInput: a flag is unknown, missing or without a value that it can have; or the model, the
            data or the place to save cannot be used.
    """
    check_names(argv)
    args = _arguments(argv)
    check_surroundings(args)
    model = hf_model_of(argv)
    architecture = Architecture.from_hf(model)
    processor_files.require(model)
    targets = [Path(folder) for folder in (args.save, args.save_hf) if folder]
    if targets and os.environ.get("RANK", "0") == "0":
        for folder in targets:
            check_writable(folder)
        refuse_links_out((file for glob in SMALL for file in model.glob(glob)), model)
    return architecture


def check_names(argv: Sequence[str]) -> None:
    """
    Raises:
        BadInput: a flag is neither ours nor one of the installed Megatron's, if that is a version
            whose flags are listed here; others are left to Megatron's own parser.
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
    """The flags of a version of megatron-core, one a line; not there for all versions."""
    return Path(__file__).with_name(f"megatron-core-{megatron}.txt")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Our flags, and those of Megatron's that :func:`check_surroundings` wants to see."""
    parser = StrictParser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    parser._option_string_actions["--hf-model"].required = False  # missing with others
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
