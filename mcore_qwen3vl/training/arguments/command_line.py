"""The command line of a training run, parsed once before torch and megatron are imported."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.identify import identify, resolve
from mcore_qwen3vl.data.config import MEDIA_BUDGETS
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.settings.schedule import growing_batches
from mcore_qwen3vl.training.arguments.megatron_flags import Sorting
from mcore_qwen3vl.training.arguments.settings import (
    SEQ_LENGTH,
    Settings,
    add_arguments,
    add_early_arguments,
)
from mcore_qwen3vl.unused.fields import Fields, Unused

COMMAND_LINE = "the command line"

NONE = "none"
"""``--FLAG none`` unsets a flag that a script set; Megatron has no value for "unset"."""

SIZES = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
)

RESETTABLE = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"),
    "--num-layers-per-virtual-pipeline-stage",
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")),
    "--sequence-parallel",
)
"""Flags that may be followed by ``none``."""

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
    "--epochs": "--num-epochs",
    "--max-length": "--seq-length",
    "--max-steps": "--train-iters",
    "--model": "--hf-model",
    "--num-train-epochs": "--num-epochs",
    "--output-dir": "--save",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--pp": "--pipeline-model-parallel-size",
    "--sp": "--sequence-parallel",
    "--tp": "--tensor-model-parallel-size",
    "--warmup-steps": "--lr-warmup-iters",
}
"""Flags of other trainers and of our other commands, with the training flag for each."""
_ACTS_WITH = {
    "--packing-buffer": ("data.packing", "it acts with --packing"),
    "--shuffle-buffer": ("data.shuffle", "it acts without --no-shuffle"),
    "--lr-warmup-init": ("schedule.has_warmup", "it acts with a warm-up"),
}
"""Flags that do nothing without another one: its setting, and the reason."""
_ABOUT_VISION = (
    *map(flag_of, MEDIA_BUDGETS),
    *("--max-decoded-pixels", "--vision-lr-mult", "--aligner-lr-mult", "--recompute-vision"),
)
"""Flags that do nothing in a run of a language model alone."""
_SIMILAR = 0.75  # of 1; a less similar flag is rarely the one meant


class CommandLine:
    """The flags of a training run; `words` is the command line for Megatron's parser."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.words = _with_train_data_path(drop_unset_flags(argv))
        self.cpu = "--cpu" in self.words

    @cached_property
    def settings(self) -> Settings:
        """What the flags say before megatron is imported, or BadInput for an invalid value."""
        flags = _parser().parse_known_args(self.words)[0]
        flags.load = load_as_saved(flags.load, flags.save)
        return Settings.from_flags(flags)

    @cached_property
    def model(self) -> Path:
        """The folder with the config that ``--hf-model`` names, or BadInput if there is none."""
        if not (named := self.settings.model.hf_model):
            _parser().error("the following arguments are required: --hf-model")
        folder = resolve(named, weights=False)
        if not folder.exists():
            raise BadInput(
                f"{folder} does not exist: check the path of --hf-model, or name a hub id, "
                "OWNER/NAME."
            )
        return identify(folder).config(flag="--hf-model")

    @cached_property
    def architecture(self) -> Architecture:
        """The model's shape."""
        return Architecture.from_hf(self.model)

    def layout(self, world_size: int) -> Layout:
        """Return the layout of the flags on `world_size` ranks.

        If the model or the ranks cannot be divided so, BadInput names both numbers and what to
        change.
        """
        settings, architecture = self.settings, self.architecture
        layout = Layout.from_flags(settings.parallel, world_size, moe=architecture.is_moe)
        if settings.parallel.has_own_split:
            # Megatron checks its own splits, so only the other sizes are checked here.
            layout = replace(layout, pp=1, vpp=1, first=None, last=None)
        # `checks` refuses what only training forbids, and names its flag.
        layout.validate(architecture, training=False)
        tp, pp, cp = layout.tp, settings.parallel.pipeline_model_parallel_size, layout.cp
        if world_size % (tp * pp * cp):
            raise BadInput(
                f"The world size is {world_size}, which TP {tp} x PP {pp} x CP {cp} = "
                f"{tp * pp * cp} does not divide: change the number of ranks (train --processes N, "
                "rehearse --gpus N) or these sizes."
            )
        micro, batch = settings.data.micro_batch_size, settings.loop.global_batch_size
        rows = micro * layout.dp
        if batch and batch % rows:
            raise BadInput(
                f"--global-batch-size {batch} is not a multiple of the {rows} rows of a pass: "
                f"micro-batches of {micro} on {layout.dp} data-parallel ranks. "
                f"Give --global-batch-size {-(-batch // rows) * rows}."
            )
        for start, grown in growing_batches(settings.loop.step_batch_size_schedule or ""):
            if not grown or grown % rows:
                raise BadInput(
                    f"--step-batch-size-schedule: a batch of {grown}, from token {start:,} on, is "
                    f"not a multiple of the {rows} rows of a pass: micro-batches of {micro} on "
                    f"{layout.dp} data-parallel ranks."
                )
        return layout

    def check_names(self) -> None:
        """Raise BadInput for flags that are unknown or would mislead.

        The list of :data:`.megatron_flags.FLAGS` answers a typo at once: Megatron's parser takes
        seconds to build. The list lacks the flags of other versions of Megatron: there Megatron's
        parser decides.
        """
        sorting = Sorting.for_installed()
        known = {*_parser()._option_string_actions, *sorting.known}
        unknown = [flag for flag in self._flag_names() if flag not in known]
        if unknown and sorting.complete:
            refuse_unknown(unknown, known)
        if refused := [flag for flag in self._flag_names() if flag in sorting.refused]:
            raise BadInput(" ".join(f"{flag}: {sorting.refused[flag]}." for flag in refused))

    def unused(self) -> list[Unused]:
        """Return the flags that change nothing in the run."""
        sorting, flags = Sorting.for_installed(), self._flag_names()
        alone = {
            flag: why
            for flag, (name, why) in _ACTS_WITH.items()
            if not attrgetter(name)(self.settings)
        }
        alone |= {
            flag: f"it acts with {other}"
            for flag, other in sorting.acts_with.items()
            if not any(self._gives(*words.split()) for words in other.split(" or "))
        }
        dense = self.settings.model.hf_model and not self.architecture.is_moe
        about_experts = [flag for flag in flags if dense and flag.startswith("--moe-")]
        without = dict.fromkeys(about_experts, "the model has no experts")
        if self.settings.model.hf_model and not self.architecture.has_vision:
            without |= dict.fromkeys(_ABOUT_VISION, "the model has no vision tower")
        reasons = {**sorting.no_effect, **alone, **without}
        known = {*_parser()._option_string_actions, *(sorting.known if sorting.complete else flags)}
        owner = Fields(COMMAND_LINE, known - reasons.keys(), reasons=reasons)
        return owner.unused(dict.fromkeys(flags, True))

    def _gives(self, flag: str, value: str | None = None) -> bool:
        """Return whether the command line has this flag, with this value if there is one."""
        # What `run_defaults` in settings.py takes on GPUs. Of several the last one counts.
        on_gpus = ["--spec", "te"]
        on_gpus += [] if {"--fp16", "--fp32"} & set(self.words) else ["--bf16"]
        words = [*([] if self.cpu else on_gpus), *self.words]
        found = False
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, given = word.partition("=")
            if name == flag:
                found = value in (None, given if equals else following)
        return found

    def _flag_names(self) -> list[str]:
        """Return the flags of the command line, without their values, in their order."""
        flags = (word.partition("=")[0] for word in self.words if word.startswith("--"))
        return list(dict.fromkeys(flags))


@cache
def _parser() -> StrictParser:
    """Return a parser of our flags, and of the Megatron flags that we read."""
    parser = StrictParser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    add_early_arguments(parser)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=SEQ_LENGTH)
    return parser


def load_as_saved(load: str | None, save: str | None) -> str | None:
    """Return `load`, written as `save` if both are the same folder."""
    same = load and save and os.path.realpath(load) == os.path.realpath(save)
    return save if same else load


def without_flags(argv: Sequence[str], names: frozenset[str]) -> list[str]:
    """Return `argv` without the flags `names` and their values."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            kept.append(word)
    return kept


def drop_unset_flags(argv: Sequence[str]) -> list[str]:
    """Remove each ``--FLAG none`` and the earlier uses of that flag from `argv`.

    A later ``--FLAG VALUE`` sets the flag again.
    """
    kept: list[str] = []
    for word in argv:
        flag, _, value = word.partition("=")
        if word == NONE and kept:
            flag, value = kept[-1], NONE  # the word before it is the flag
        if value == NONE and flag in RESETTABLE:
            kept = without_flags(kept, frozenset({flag}))
        else:
            kept.append(word)
    return kept


def _with_train_data_path(argv: Sequence[str]) -> list[str]:
    """Rename ``--data-path``: with ``--valid-data-path`` Megatron wants ``--train-data-path``."""
    if not any(word.partition("=")[0] == "--valid-data-path" for word in argv):
        return list(argv)
    return [re.sub(r"^--data-path(?=$|=)", "--train-data-path", word) for word in argv]


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise ``BadInput`` and suggest known flags: the ``error`` method of a parser."""
    if message.startswith(_UNKNOWN):
        refuse_unknown(message.removeprefix(_UNKNOWN).split(), parser._option_string_actions)
    raise BadInput(f"{message}. {_HELP}")


def refuse_unknown(words: Collection[str], known: Collection[str]) -> NoReturn:
    """Raise BadInput, and suggest flags for the misspelt ones."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    close = list(dict.fromkeys(meant for flag in flags for meant in _likely_flags(flag, known)))
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    raise BadInput(f"{_UNKNOWN}{' '.join(words)}.{meant} {_HELP}")


def _likely_flags(flag: str, known: Collection[str]) -> list[str]:
    """Return the flags that `flag` may stand for, the likeliest first."""
    if flag in _ELSEWHERE:
        return [_ELSEWHERE[flag]]
    alike = get_close_matches(flag, [*_ELSEWHERE, *known], 2, _SIMILAR)
    return [_ELSEWHERE.get(name, name) for name in alike]


class StrictParser(argparse.ArgumentParser):
    """An argument parser that raises ``BadInput`` instead of exiting."""

    error = refuse
