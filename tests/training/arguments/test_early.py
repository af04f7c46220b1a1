"""A command line that cannot work is refused before anything slow starts."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mcore_qwen3vl
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.identify import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import version_of
from mcore_qwen3vl.training.arguments import checks, command_line
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import FLAGS, LISTED, CommandLine, Sorting
from mcore_qwen3vl.training.folders import claim_folders


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-itres=3"], "Did you mean --train-iters"),
        (["--leraning-rate", "1e-5"], r"Did you mean --lr\?"),
        (["--tp", "2"], r"Did you mean --tensor-model-parallel-size\?"),
        (["--rampup-batch-size", "1", "1", "4"], "--rampup-batch-size: .* --step-batch-size-sch"),
        (["--chat-template", "{{{{1/0}}}}"], "--chat-template: .* put it into its chat_template"),
        (["--mtp-standalone", "--sft"], "multi-token prediction. --sft: records say"),
        (["--dryrun"], r"Did you mean --dry-run \(of a launch script\)\?"),
        (["--lr-wrong"], r"unrecognized arguments: --lr-wrong\. mcore-qwen3vl train --help"),
        (["--train-iters", "3", "--weight-decay"], None),  # left to Megatron, whose flag it is
        (["--train-iters", "3", "--save-interval"], "--persistent-save-interval: expected one arg"),
        (["--train-iters", "many"], "--train-iters: invalid int value: 'many'"),
        (["--train-iters", "3", "--max-bad-fraction", "x"], "invalid float value: 'x'"),
        (["--train-iters", "3", "--max-bad-fraction", "2"], "--max-bad-fraction is 2.0; it must"),
        (["--train-iters", "3", "--max-decoded-pixels", "0"], "--max-decoded-pixels is 0; it must"),
        (["--train-iters", "3", "--balance"], "--balance needs packing"),
        (["--skip-train", "--valid-data-path", "{data}"], r"give --train-iters N\.$"),
        (["--skip-train", "--train-iters", "3"], "--skip-train without --valid-data-path PATH"),
        (["--skip-train", "--train-samples", "3", "--valid-data-path", "{data}"], None),
        (
            ["--skip-train", "--num-epochs", "1", "--valid-data-path", "{data}"],
            "--skip-train with --num-epochs, .* give --train-iters N",
        ),
        (["--train-iters", "3", "--load-hf", "gone"], "gone does not exist: check .* --load-hf"),
        (
            ["--train-iters", "3", "--save", "{run}", "--ckpt-step", "17"],
            "--ckpt-step 17: .* has no checkpoint of that step; it has 2, 10",
        ),
        (["--train-iters", "3", "--save", "{run}", "--ckpt-step", "10"], None),
        (["--train-iters", "3", "--lora-target", "q_poj"], r"q_poj names no .* mean q_proj\?"),
        (["--train-iters", "3", "--lora-target", "languge"], r"Did you mean language\?"),
        (["--train-iters", "3", "--lora-target", "layers.0.self_attn.q_proj", "attn.qkv"], None),
        (["--train-iters", "3", "--lora-target", ".*q_poj"], None),  # a pattern is PEFT's to read
        (["--train-iters", "3", "--save", "{data}/run"], "run cannot be written: Not a directory"),
        (["--train-iters", "3", "--hf-model", "modle"], "modle does not exist: .* --hf-model"),
        (
            ["--train-iters", "3", "--save-hf", "{run}"],
            "holds the export iter_0000010 of another run",
        ),
        (["--train-iters", "3", "--save-hf", "{run}", "--save", "{run}"], "--save-hf are both"),
        (["--train-iters", "3", "--freeze-all-layers"], "trains nothing: use --freeze, or"),
    ],
)
def test_what_is_answered_at_once(
    flags: list[str], message: str | None, dense: Path, data: Path, tmp_path: Path, listed: None
) -> None:
    for step in (10, 2):
        (tmp_path / f"iter_{step:07d}").mkdir()
    given = [flag.format(data=data, run=tmp_path) for flag in flags]
    argv = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), *given]
    if message is None:
        check_early(CommandLine(argv))
        return
    with pytest.raises(BadInput, match=message):
        check_early(CommandLine(argv))


STEPS, SAMPLES = "--train-iters 8", "--train-samples 80"
WSD = "--lr-decay-style WSD"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{STEPS} --lr-warmup-iters 7", None),
        (
            f"{STEPS} --lr-warmup-iters 8",
            "8 with a run of 8 steps: .* Give at most 7, or --lr-warm",
        ),
        (f"{SAMPLES} --lr-warmup-samples 90", "90 with a run of 80 samples: .* at most 79, or"),
        (f"{STEPS} --lr-decay-iters 4 --lr-warmup-iters 4", "with --lr-decay-iters 4: .* most 3,"),
        (f"{STEPS} --lr-decay-iters 20 --lr-warmup-iters 9", None),
        (
            f"{STEPS} --lr-warmup-samples 9",
            "length of this run is a number of steps, so give --lr-w",
        ),
        (f"{SAMPLES} --lr-decay-iters 9", "a number of samples, so give --lr-decay-samples N"),
        ("--num-epochs 1 --lr-warmup-samples 9", "a number of steps, so give --lr-warmup-iters N"),
        (f"{STEPS} --lr-warmup-iters -1", "--lr-warmup-iters is -1; it is at least 0"),
        (f"{STEPS} --lr-decay-iters 0", "--lr-decay-iters is 0; it is at least 1"),
        (f"{SAMPLES} --lr-decay-samples 0", "--lr-decay-samples is 0; it is at least 1"),
        (f"{STEPS} --lr-warmup-fraction 0.9", None),
        (f"{STEPS} --lr-warmup-fraction 1", "--lr-warmup-fraction 1: it is a part of .* below 1"),
        (f"{STEPS} {WSD}", "needs the steps at its end .* --lr-wsd-decay-iters N, at most 8"),
        (f"{SAMPLES} {WSD}", "give --lr-wsd-decay-samples N, at most 80"),
        (f"{STEPS} {WSD} --lr-wsd-decay-iters 5 --lr-warmup-iters 3", None),
        (f"{STEPS} {WSD} --lr-wsd-decay-iters 6 --lr-warmup-iters 3", "at most 5, and not 6"),
        (f"{STEPS} --min-lr 2e-5", "--min-lr 2e-05 with --lr 1e-05: .* at most --lr"),
        (f"{STEPS} --lr 1e-3 --min-lr -1", "--min-lr -1 with --lr 0.001: .* at least 0"),
        (f"{STEPS} --lr nan", "--min-lr 0 with --lr nan"),
        (f"{STEPS} --lr-warmup-init 1", "--lr-warmup-init 1 with --lr 1e-05: .* at most --lr"),
        (f"{STEPS} --start-weight-decay 1", "need --weight-decay-incr-style linear or cosine"),
        (f"{STEPS} --weight-decay-incr-style linear", "needs --start-weight-decay X and --end-wei"),
        (
            f"{STEPS} --weight-decay-incr-style cosine --start-weight-decay 2 --end-weight-decay 1",
            "cosine needs .* with 0 <= X <= Y",
        ),
        (
            f"{STEPS} --override-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
            "leave one out",
        ),
        (f"{STEPS} --step-batch-size-schedule 0:1", "with --train-iters: .* --train-samples N"),
        (f"{SAMPLES} --step-batch-size-schedule 0:1", None),
    ],
)
def test_a_schedule_that_a_run_has_no_room_for_is_refused_at_once(
    flags: str, message: str | None, dense: Path, data: Path
) -> None:
    base = ["--cpu", "--hf-model", str(dense), "--data-path", str(data)]
    command = CommandLine([*base, *flags.split()])
    if message is None:
        check_early(command)
        return
    with pytest.raises(BadInput, match=message):
        check_early(command)


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


def test_a_save_in_the_background_has_a_process_of_its_own(dense: Path, data: Path) -> None:
    base = ["--hf-model", str(dense), "--data-path", str(data), "--train-iters", "3"]
    with pytest.raises(BadInput, match=r"only with --use-persistent-ckpt-worker\. Add it"):
        check_early(CommandLine([*base, "--async-save"]))
    worker = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    check_early(CommandLine([*base, *worker]))
    with pytest.raises(BadInput, match=r"--async-save with --cpu: .* Drop --async-save"):
        check_early(CommandLine([*base, *worker, "--cpu"]))


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_one_iteration_is_refused(dense: Path, data: Path, tmp_path: Path, flag: str) -> None:
    """Megatron, which looks for a tracker, would start from random weights."""
    run = tmp_path / "run"
    hf_to_mcore(dense, run)
    (run / "release").rename(run / "iter_0000010")
    (run / TRACKER).write_text("10")
    model = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), "--train-iters", "10"]
    check_early(CommandLine([*model, flag, str(run)]))
    step = " --ckpt-step 10" if flag == "--load" else ""
    with pytest.raises(BadInput, match=rf"is one iteration.* use {flag} {run}{step}\."):
        check_early(CommandLine([*model, flag, str(run / "iter_0000010")]))


def test_a_finished_run_is_refused_the_folder_of_another_runs_exports(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """It would have taken the other's export of its last step for its own."""
    for run in ("first", "second"):
        claim_folders(str(tmp_path / run), str(tmp_path / f"{run}-hf"))
        for folder in (run, f"{run}-hf"):
            (tmp_path / folder / "iter_0000010").mkdir()

    def check(save: str, exports: str) -> None:
        flags = ["--save", str(tmp_path / save), "--save-hf", str(tmp_path / exports)]
        model = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), "--train-iters", "10"]
        check_early(CommandLine([*model, *flags]))

    check("first", "first-hf")
    claim_folders(str(tmp_path / "first"), str(tmp_path / "first-hf"))  # as each export does
    check("first", "first-hf")
    with pytest.raises(BadInput, match="first-hf holds the export iter_0000010 of another run"):
        check("second", "first-hf")


def test_a_batch_that_ranks_do_not_divide_is_named(dense: Path) -> None:
    command = CommandLine(["--hf-model", str(dense), "--global-batch-size", "3"])
    said = "--global-batch-size 3 is not a multiple of the 2 rows .* Give --global-batch-size 4"
    with pytest.raises(BadInput, match=said):
        command.layout(2)


def test_data_paths_may_have_an_equals_sign(dense: Path, data: Path) -> None:
    argv = [f"--hf-model={dense}", f"--data-path={data}", f"--valid-data-path={data}"]
    loop = CommandLine(argv).settings.loop
    assert (loop.data_path, loop.train_data_path) == (None, (str(data),))


@pytest.mark.parametrize(
    ("flags", "package", "message"),
    [
        (["--optimizer", "muon"], "emerging_optimizers", r"muon needs .*emerging-optimizers>=0\.2"),
        (["--use-megatron-fsdp"], "einops", "einops, or use --use-distributed-optimizer"),
        (
            ["--async-save", "--use-persistent-ckpt-worker"],
            "nvidia_resiliency_ext",
            "nvidia-resiliency-ext: install it, or add --async-strategy mcore",
        ),
    ],
)
def test_a_package_that_a_flag_needs_is_named(
    flags: list[str],
    package: str,
    message: str,
    dense: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ["--hf-model", str(dense), "--data-path", str(data), "--train-iters", "3"]
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(BadInput, match=message):
        check_early(CommandLine([*base, *flags]))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    check_early(CommandLine([*base, *flags]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-megatron-fsdp"], "--use-megatron-fsdp with --cpu: .* needs CUDA"),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2 with --cpu: .* needs CUDA"),
        (["--optimizer", "muon", "--use-distributed-optimizer"], "muon with .* needs --bf16"),
    ],
)
def test_what_megatron_cannot_build_is_refused(
    flags: list[str], message: str, dense: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    base = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), "--train-iters", "3"]
    with pytest.raises(BadInput, match=message):
        check_early(CommandLine([*base, *flags]))


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


@pytest.fixture(scope="module")
def runs(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of steps 2 and 4, a link to it, and ``hf``.

    In ``adapter`` are an adapter and the tracker of the run of ms-swift's that trained it.
    """
    tmp_path = tmp_path_factory.mktemp("runs")
    for step in (2, 4):
        hf_to_mcore(dense, tmp_path / "converted")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "converted" / "release").rename(tmp_path / "run" / f"iter_{step:07d}")
        shutil.rmtree(tmp_path / "converted")
    (tmp_path / "run" / TRACKER).write_text("4")
    (tmp_path / "link").symlink_to("run")
    shutil.copytree(dense, tmp_path / "run" / "exports" / "iter_0000004")
    shutil.copytree(dense, tmp_path / "hf")
    hf_to_mcore(dense, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    for name, text in (("adapter_config.json", "{}"), (TRACKER, "4")):
        (tmp_path / "adapter" / name).write_text(text)
    return tmp_path


OVERWRITTEN = "holds a run, up to iter_0000004, which {} would overwrite: name another folder"
BOTH_OVERWRITE = OVERWRITTEN.format("--load and --finetune")
ALONE = OVERWRITTEN.format("--finetune") + ".* or leave out --finetune"
INSIDE = "the checkpoint .*/{}, or inside it: name another folder with {}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load run --finetune --save run", ALONE),
        ("--finetune --save run", ALONE),
        ("--load run --finetune --save {here}/run/", ALONE),
        ("--load link --finetune --save run", ALONE),
        ("--load run/ --finetune --save hf/../link", ALONE),
        ("--load base --save run", OVERWRITTEN.format("--load")),
        ("--load base --finetune --save run", BOTH_OVERWRITE),
        ("--load run --ckpt-step 2 --save link", "from --ckpt-step 2 would overwrite: add --load"),
        ("--load run --finetune --save run/new", "--save run/new is the folder that the weights"),
        ("--pretrained-checkpoint base --save base", "--save base is the folder that the weights"),
        ("--load run --finetune --save run/iter_0000004", INSIDE.format("iter_0000004", "--save")),
        ("--save run/exports/iter_0000004", INSIDE.format("exports/iter_0000004", "--save")),
        ("--load-hf hf --save hf", INSIDE.format("hf", "--save")),
        ("--load-hf hf --save adapter", INSIDE.format("adapter", "--save")),
        ("--load-hf hf --save-hf hf", INSIDE.format("hf", "--save-hf")),
        ("--hf-model hf --save-hf hf/../hf/new", INSIDE.format("hf", "--save-hf")),
        ("--save run --save-hf link", "--save and --save-hf are both run"),
        ("--save run", None),
        ("--load link --save run/", None),
        ("--load run --ckpt-step 4 --save run", None),
        ("--load run --ckpt-step 2 --save new", None),
        ("--load run --finetune --save new --save-hf new/exports", None),
        ("--load-hf hf --save new --save-hf new-hf", None),
        ("--hf-model hf --load base --save base", None),  # beside what was converted
    ],
)
def test_a_run_overwrites_nothing_that_it_does_not_resume(
    flags: str,
    message: str | None,
    dense: Path,
    data: Path,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    words = flags.format(here=runs).split()
    length = ["--cpu", "--train-iters", "8", "--data-path", str(data)]
    command = CommandLine(["--hf-model", str(dense), *length, *words])
    if message is None:
        check_early(command)
        return
    with pytest.raises(BadInput, match=message):
        check_early(command)
