"""Every flag of Megatron's is sorted once, for each version."""

from __future__ import annotations

import argparse
import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import package_modules
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.megatron_flags import FLAGS, Sorting


@pytest.fixture(scope="module")
def megatron_flags() -> dict[str, str]:
    """Return the `dest` of each of Megatron's flags."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    flags = parser._option_string_actions.items()
    return {flag: action.dest for flag, action in flags if flag.startswith("--")}


def test_every_flag_of_the_installed_megatron_is_sorted_once(
    megatron_flags: dict[str, str],
) -> None:
    """For another version, add its flags to the list, each below what it does."""
    listed = [line for line in FLAGS.read_text().splitlines() if line.startswith("--")]
    assert len({line.split()[0] for line in listed}) == len(listed)
    sorting = Sorting.for_installed()
    assert sorting.known == megatron_flags.keys()
    assert all([*sorting.refused.values(), *sorting.no_effect.values()])


UNREAD = re.compile(
    r"megatron/(rl|post_training|legacy|core/(inference|export|ssm|datasets|tokenizers|models/(?!"
    r"common|gpt/gpt_model))|training/(arguments|argument_utils|yaml_arguments|theoretical_|models|"
    r"datasets|distillation|config))"
)
"""Megatron's modules without use in a run, or modules that only pass arguments on."""
TURNED_INTO_OTHERS = re.compile(
    r"muon_.*|moe_(deepep|hybridep)_num_sms|no_weight_decay_cond_type|recompute_activations|"
    r"bias_swiglu_fusion|init_method_xavier_uniform|grad_reduce_in_bf16|"
    r"num_layers_per_virtual_pipeline_stage|te_precision_config_file|disable_msc_deprecated|"
    r"untie_embeddings_and_output_weights"
)
"""Arguments that the parser, or a builder of a config, turns into others."""


@pytest.mark.slow
def test_what_is_said_to_reach_the_run_is_read_by_something(megatron_flags: dict[str, str]) -> None:
    sorting, megatron = Sorting.for_installed(), find_spec("megatron.core")
    assert megatron is not None
    assert megatron.origin is not None
    files = [*Path(megatron.origin).parents[1].rglob("*.py"), *package_modules().values()]
    read: set[str] = set()
    for file in files:
        if UNREAD.search(file.as_posix()):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    read.add(name)
                case ast.Call(ast.Name("getattr" | "hasattr"), [_, ast.Constant(str(name)), *_]):
                    read.add(name)
    reaching = {megatron_flags[flag] for flag in sorting.reaching}
    assert not [name for name in reaching - read if not TURNED_INTO_OTHERS.fullmatch(name)]


def test_flags_that_the_list_may_lack_are_left_to_megatron(
    listed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--train-itres", "3"]
    with pytest.raises(BadInput, match=r"--train-itres\. Did you mean --train-iters"):
        CommandLine(argv).check_names()
    for version in ("0.19.99", "0.20.0", "1.0.0"):
        monkeypatch.setattr(f"{Sorting.__module__}.version_of", lambda name, one=version: one)
        CommandLine(argv).check_names()
        with pytest.raises(BadInput, match="--sft: records say"):
            CommandLine(["--sft"]).check_names()
        assert [item.name for item in CommandLine(["--split=9,1"]).unused()] == ["--split"]


def test_a_flag_of_later_versions_is_unknown_before(
    listed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--enable-mhc-connections"]
    with pytest.raises(BadInput, match="unrecognized"):
        CommandLine(argv).check_names()
    for version in ("0.20.0", "0.20.0rc0"):
        monkeypatch.setattr(f"{Sorting.__module__}.version_of", lambda name, one=version: one)
        with pytest.raises(BadInput, match="not supported with this model"):
            CommandLine(argv).check_names()
