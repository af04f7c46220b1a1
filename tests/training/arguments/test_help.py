"""``--help`` of the training commands shows the right flags."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from megatron.training.arguments import add_megatron_arguments

from mcore_qwen3vl.cli import main as command_line
from mcore_qwen3vl.converters.adapters.config import Preset
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import field_docs
from mcore_qwen3vl.losses.distillation import Distillation, DistillationLoss
from mcore_qwen3vl.losses.embedding import Contrastive, Embedding
from mcore_qwen3vl.losses.kto import Kto, KtoLoss
from mcore_qwen3vl.losses.preference import DEFAULTS, Preference, PreferenceLoss
from mcore_qwen3vl.losses.reranker import ANSWERS, Reranker
from mcore_qwen3vl.losses.teacher_file import TEACHER_TOP_K
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.settings.lora import RANK, LoraSettings
from mcore_qwen3vl.settings.run import NOT_READ_EARLY
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import COMMON, help_words, print_help
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import add_arguments, add_early_arguments
from mcore_qwen3vl.training.run import main

ROOT = Path(__file__).parents[3]


def test_all_of_megatrons_flags_print_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(CommandLine(["--help"]))
    assert left.value.code == 0
    printed = capsys.readouterr().out
    for expected in ("--tensor-model-parallel-size", "--hf-model", "\nqwen3-vl data:\n"):
        assert expected in printed


def test_words_choose_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(CommandLine(["--help", "--Context", "parallel-size"]))
    printed = capsys.readouterr().out
    assert "--context-parallel-size" in printed
    assert "--hf-model DIR " not in printed.split("\n\n", 1)[1]
    assert "\nRNG and initialization:" not in printed


def test_what_we_read_of_megatrons_flags_is_megatrons() -> None:
    """Names, types and numbers of values are, and its validation sets the other fields."""
    ours, theirs = argparse.ArgumentParser(), argparse.ArgumentParser(allow_abbrev=False)
    add_early_arguments(ours)
    known = add_megatron_arguments(theirs)._option_string_actions
    for flag, action in ours._option_string_actions.items():
        if flag not in ("-h", "--help"):
            same = known[flag]
            assert (action.dest, action.nargs) == (same.dest, same.nargs), flag
            assert (action.type or str) == (same.type or str), flag
            assert isinstance(action.default, bool) <= (same.nargs == 0), flag
    args = validate(
        ["--cpu", "--hf-model", str(PUBLISHED / "2b.json"), "--train-iters", "1"], 1
    ).args
    assert all(hasattr(args, name) for name in NOT_READ_EARLY)


def test_no_flag_about_a_word() -> None:
    with pytest.raises(BadInput, match="No flag is about 'parakeet'"):
        print_help(argparse.ArgumentParser(), ["parakeet"])


def test_words_come_after_help() -> None:
    assert help_words(["--cpu", "-h", "Pipeline", "--size"]) == ["pipeline", "size"]
    assert help_words(["--cpu"]) is None


def test_every_flag_of_ours_has_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line(["train", "--help"])
    assert left.value.code == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    for action in actions:
        assert action.help, action.dest
        assert action.option_strings[0] in printed
    assert "share of the data set is bad; default: 0.05" in printed
    assert "default: one sample a row, padded" in printed


def test_common_flags_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(["train", "--help"])
    printed = capsys.readouterr().out
    common, ours = printed.split("\nqwen3-vl model:\n")
    for flag in ("--train-iters", "--save", "--load", "--lr", "--seq-length", "--spec"):
        assert f"\n  {flag} " in common
        assert f"\n  {flag} " not in ours


def test_common_flags_are_megatrons_and_mean_what_it_says() -> None:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for usage in COMMON:
        flag, _, value = usage.partition(" ")
        assert (parser._option_string_actions[flag].nargs == 0) == (not value), flag


@pytest.mark.slow
def test_the_script_says_it_without_a_traceback() -> None:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--help", "seq-length"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--seq-length" in done.stdout
    assert "Traceback" not in done.stderr


def test_texts_name_the_defaults_in_use() -> None:
    """A docstring cannot compute, so a default that another class has is written out in it."""
    stated = {
        (PreferenceLoss, "beta"): f"default {Preference.beta}, with simpo "
        f"{DEFAULTS['simpo']['beta']}",
        (PreferenceLoss, "dpo_loss"): f"default {Preference.kind}",
        (PreferenceLoss, "simpo_gamma"): f"default {DEFAULTS['simpo']['gamma']}",
        (KtoLoss, "desirable_weight"): f"default {Kto.desirable_weight:g}",
        (DistillationLoss, "distill_divergence"): f"default {Distillation.divergence}",
        (DistillationLoss, "distill_beta"): f"default {Distillation.beta}",
        (DistillationLoss, "distill_temperature"): f"default {Distillation.temperature:g}",
        (DistillationLoss, "distill_alpha"): f"default {Distillation.alpha:g}",
        (DistillationLoss, "teacher_top_k"): f"default {TEACHER_TOP_K}",
        (Embedding, "embedding_loss"): f"{Contrastive.kind} (the default)",
        (Embedding, "temperature"): f"default {Contrastive.temperature}",
        (Reranker, "answers"): f"default: {' '.join(ANSWERS)}",
        (LoraSettings, "lora_rank"): f"default {RANK}",
        (LoraSettings, "lora_target"): f"what to adapt: {', '.join(get_args(Preset))} (default",
    }
    for (owner, name), text in stated.items():
        assert text in field_docs(owner)[name]
