"""The flags that reach a run are sorted, and a command line that cannot work is refused."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mcore_qwen3vl
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import version_of
from mcore_qwen3vl.training.arguments import command_line
from mcore_qwen3vl.training.arguments.command_line import FLAGS, LISTED, CommandLine, Sorting


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
"""Megatron's modules that a run does not use, or that only pass arguments on."""
TURNED_INTO_OTHERS = re.compile(
    r"muon_.*|moe_(deepep|hybridep)_num_sms|no_weight_decay_cond_type|recompute_activations|"
    r"bias_swiglu_fusion|init_method_xavier_uniform|grad_reduce_in_bf16|"
    r"num_layers_per_virtual_pipeline_stage|te_precision_config_file|disable_msc_deprecated|"
    r"untie_embeddings_and_output_weights"
)
"""Arguments that the parser, or a function that builds a config, turns into others."""


@pytest.mark.slow
def test_what_is_said_to_reach_the_run_is_read_by_something(megatron_flags: dict[str, str]) -> None:
    sorting, megatron = Sorting.for_installed(), find_spec("megatron.core")
    assert megatron is not None
    assert megatron.origin is not None
    roots = (Path(megatron.origin).parents[1], Path(mcore_qwen3vl.__file__).parent)
    read: set[str] = set()
    for file in (file for root in roots for file in root.rglob("*.py")):
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


def test_flags_that_change_nothing_are_named_and_those_that_mislead_refused() -> None:
    words = (
        "--split=9,1 --tokenizer-model m --seed 3 --packing-buffer 4 --eval-interval 3 "
        "--mtp-loss-scaling-factor 0.2"
    )
    unused = CommandLine(words.split()).unused()
    assert [item.name for item in unused] == [
        "--split", "--tokenizer-model", "--packing-buffer", "--eval-interval",
        "--mtp-loss-scaling-factor",
    ]  # fmt: skip
    assert all(item.why and item.where == "the command line" for item in unused)
    used = "--packing --packing-buffer 4 --valid-data-path v --eval-iters 2 --eval-interval 3"
    assert not CommandLine(used.split()).unused()


def test_flags_that_the_list_may_lack_are_left_to_megatron(
    listed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--train-itres", "3"]
    with pytest.raises(BadInput, match=r"--train-itres\. Did you mean --train-iters"):
        CommandLine(argv).check_names()
    for version in ("0.19.99", "0.20.0", "1.0.0"):
        monkeypatch.setattr(command_line, "version_of", lambda name, version=version: version)
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
        monkeypatch.setattr(command_line, "version_of", lambda name, version=version: version)
        with pytest.raises(BadInput, match="not supported with this model"):
            CommandLine(argv).check_names()


STEPS, SAMPLES = "--train-iters 8", "--train-samples 80"
WSD = "--lr-decay-style WSD"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0:2,1K:4", None),
        (
            "0:2 1.5K:3",
            "batch of 3, from token 1,500 on, is not a multiple of the 2 rows of a pass",
        ),
        ("0:1,1B:4", "batch of 1, from token 0 on, is not a multiple of the 2 rows"),
        ("0:2,8", "'8' is no TOKENS:SAMPLES"),
    ],
)
def test_a_batch_grows_to_what_the_ranks_can_divide(
    schedule: str, message: str | None, dense: Path, data: Path
) -> None:
    """Megatron asserts it when the batch grows, which may be after days."""
    base = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), *SAMPLES.split()]
    command = CommandLine([*base, "--step-batch-size-schedule", schedule])
    if message is None:
        command.layout(2)
        return
    with pytest.raises(BadInput, match=message):
        command.layout(2)


def test_flags_of_another_schedule_are_named() -> None:
    flags = "--lr-warmup-init 1e-6 --lr-wsd-decay-style linear --lr-wsd-decay-iters 3"
    assert [item.name for item in CommandLine(flags.split()).unused()] == flags.split()[::2]
    used = f"{flags} {WSD} --lr-warmup-iters 2"
    assert not CommandLine(used.split()).unused()


def test_a_batch_that_ranks_do_not_divide_is_named(dense: Path) -> None:
    command = CommandLine(["--hf-model", str(dense), "--global-batch-size", "3"])
    said = "--global-batch-size 3 is not a multiple of the 2 rows .* Give --global-batch-size 4"
    with pytest.raises(BadInput, match=said):
        command.layout(2)


def test_data_paths_may_have_an_equals_sign(dense: Path, data: Path) -> None:
    argv = [f"--hf-model={dense}", f"--data-path={data}", f"--valid-data-path={data}"]
    loop = CommandLine(argv).settings.loop
    assert (loop.data_path, loop.train_data_path) == (None, (str(data),))


@pytest.mark.skipif(version_of("megatron-core") != LISTED, reason="its own parser finds a typo")
def test_the_command_says_it_without_torch(dense: Path) -> None:
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as left: sys.exit(left.code + 40 * ('torch' in sys.modules))"
    )
    for flags in (["--train-itres", "3"], ["--tensor-model-parallel-size", "3"], []):
        known = ["--train-iters", "3", "--data-path", str(dense)] if len(flags) > 1 else []
        command = ["train", "--cpu", "--hf-model", str(dense), *known, *flags]
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True)
        assert done.returncode == 2, done.stderr.decode()
        assert done.stderr.startswith(b"error: ")
        assert len(done.stderr.splitlines()) == 1
