"""Flags that do not fit one another, the model or this machine are refused early."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.identify import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments import checks
from mcore_qwen3vl.training.arguments.checks import check_deep_ep, check_early, check_surroundings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.folders import claim_folders
from tests.training.arguments.commands import FIRST, TP2, parsed

KEPT = ("--keep-best", "--save", "run")


VALIDATION = ("--valid-data-path", "v.jsonl", "--eval-iters", "1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--spec", "te"), "--spec te needs Transformer Engine"),
        (("--spec", "flash"), "one of te, torch"),
        (("--spec", "te", "torch"), "--spec is te torch; it must be one"),
        (("--spec",), "--spec is empty; it must be one"),
        (("--packing", "--micro-batch-size", "2"), "one sequence"),
        (("--save-hf-interval", "5"), "--save-hf DIR"),
        (("--eval-iters", "2"), "--valid-data-path"),
        (("--full-validation",), "without --valid-data-path"),
        ((*VALIDATION, "--full-validation"), "--eval-iters on a part: leave one of them out"),
        ((*VALIDATION, "--eval-iters", "-2"), "--eval-iters is -2; leave it out"),
        (KEPT, "--keep-best needs the validation loss: add --valid"),
        (("--early-stop-patience", "3"), "--early-stop-patience needs the validation loss"),
        ((*VALIDATION, "--early-stop-patience", "0"), "patience is 0; it is at least 1"),
        ((*VALIDATION, "--keep-best"), "--keep-best is set without --save DIR"),
        (
            (*VALIDATION, *KEPT, "--save-retain-interval", "1000"),
            "--save-retain-interval also decides when checkpoints are written or removed",
        ),
        (
            (*VALIDATION, *KEPT, "--async-save", "--use-persistent-ckpt-worker"),
            "--async-save also decides when checkpoints are written or removed",
        ),
        (("--fp8-format", "e4m3"), "needs Transformer Engine"),
        (("--cuda-graph-impl", "local"), r"--cuda-graph-impl local \(.*: a CUDA graph needs"),
        (("--cuda-graph-impl", "transformer_engine"), "leave DeepStack out: drop the flag"),
        (("--enable-cuda-graph",), "a CUDA graph needs the same number of image tokens"),
        (("--external-cuda-graph",), "a CUDA graph needs the same number of image tokens"),
        (("--no-such-flag", "3"), r"unrecognized arguments: --no-such-flag 3\. .*--help"),
        (("--global-batch-size", "0"), "--global-batch-size is 0; it is at least 1"),
        (("--padded-vocab-size", "-1"), "size is -1: it must be at least the model's vocab_size"),
        (("--padded-vocab-size", "0"), "Leave it out, and Megatron pads as needed"),
        (("--tensor-model-parallel-size", "2"), "The world size is 1, which TP 2 x PP 1 x CP 1"),
        (("--tensor-model-parallel-size", "3"), "heads cannot be divided over TP 3: use TP 2"),
    ],
)
def test_flags_that_do_not_fit_together(flags: tuple[str, ...], message: str, dense: Path) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(dense, *flags)


MTP = ("--mtp-num-layers", "1")


EP2 = ("--expert-model-parallel-size", "2")


PP2 = ("--pipeline-model-parallel-size", "2")


VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")


FLEX = ("--moe-token-dispatcher-type", "flex")


OVERLAP = ("--overlap-moe-expert-parallel-comm", *EP2)


LEGACY = ("--ckpt-format", "torch", "--save", "run")


SIMPO = (
    *("--loss", "simpo", "--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"),
    *("--moe-aux-loss-coeff", "0.01", "0.02"),
)


BALANCE = ("--moe-router-load-balancing-type",)


GATHER = ("--moe-token-dispatcher-type", "allgather")


DEFER = "--defer-embedding-wgrad-compute"


FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")


EXPERTS = ("--recompute-granularity", "selective", "--recompute-modules", "moe")


@pytest.mark.parametrize(
    ("kind", "ranks", "flags", "message"),
    [
        ("moe", 2, TP2, "add --sequence-parallel"),
        ("moe", 1, ("--optimizer", "lion"), "--optimizer lion is for matrices"),
        ("moe", 1, SIMPO, "--moe-aux-loss-coeff 0.01 0.02 with --loss simpo"),
        ("hybrid", 1, LEGACY, "legacy checkpoint of a model with gated delta nets"),
        # The overlap of the experts' exchange.
        ("moe", 2, OVERLAP, "add --bf16"),
        ("moe", 4, (*OVERLAP, "--bf16", *EP2[:1], "1"), "add --expert-model-parallel-size N"),
        ("moe", 4, (*OVERLAP, "--bf16", *FLEX[:1], "allgather"), "alltoall or flex"),
        ("moe", 4, (*OVERLAP, "--bf16", *FULL), "drop --recompute"),
        ("moe", 4, (*OVERLAP, "--bf16", *EXPERTS), "take moe out"),
        ("moe", 4, (*OVERLAP, "--bf16", *PP2), "add --num-virtual-stages-per-pipeline-rank N"),
        # Megatron refuses it for `torch`.
        ("moe", 4, (*OVERLAP, "--bf16", "--delay-wgrad-compute"), "[Dd]elay.*wgrad.compute"),
        # What DeepEP's kernels cannot do.
        ("moe", 2, (*FLEX, "--bf16"), "nothing is exchanged: add --expert-model-parallel-size"),
        ("moe", 2, (*FLEX, *EP2), "in bf16: add --bf16"),
        # Virtual stages.
        ("dense", 2, (*PP2, *VIRTUAL, "--global-batch-size", "1"), r"\(1, of 1 on DP 1\).* 2, or"),
        ("dense", 2, (*PP2, *VIRTUAL), "--global-batch-size 1 has too few micro-batches"),
        ("dense", 1, ("--attention-backend", "flesh"), "'flesh' is none of flash, fused, unfused"),
        # Routers and experts.
        ("moe", 1, (*BALANCE, "sinkhorn"), f"{BALANCE[0]} sinkhorn sends tokens to other experts"),
        ("moe", 1, (*BALANCE, "quantile_balancing"), "use aux_loss, seq_aux_loss"),
        ("moe", 1, (*BALANCE, "seq_aux_loss", "--packing"), "takes a pack for one sequence"),
        ("moe", 2, (*FIRST, *TP2, "--sequence-parallel"), "drop the ends of their parts"),
        ("moe", 2, (*FIRST, "--context-parallel-size", "2"), "Use probs, the default"),
        ("moe", 2, (*GATHER, *EP2, "--pad-to-longest"), "use alltoall.*, or give --seq-length N"),
        ("moe", 2, (*GATHER, *EP2, *VALIDATION, "--packing"), r"alltoall, the default\."),
        ("moe", 1, ("--cpu", "--moe-routing-trace-path", "x"), "trace-path with --cpu: Megatron's"),
        ("moe", 1, ("--moe-router-padding-for-fp8",), "padding-for-fp8 pads .* add --fp8-format"),
        ("moe", 1, ("--moe-router-padding-for-quantization",), "or leave it out"),
        # MTP.
        ("dense", 2, MTP, "--mtp-num-layers 1: the model has no such layer .* Leave the flag out"),
        ("hybrid", 2, (*MTP[:1], "2"), "--mtp-num-layers 2: the model has 1 .* set it to 1"),
        ("hybrid", 2, (*MTP, "--loss", "orpo"), "--mtp-num-layers with --loss orpo"),
        ("hybrid", 2, (*MTP, "--loss", "distill"), "--mtp-num-layers with --loss distill"),
        ("hybrid", 2, (*MTP, "--task", "embedding"), "--mtp-num-layers with --task embedding"),
        ("hybrid", 2, (*MTP, "--lora-rank", "4", "--load-hf", "x"), "--mtp-num-layers with LoRA"),
        ("hybrid_moe", 2, (*MTP, *OVERLAP, "--bf16"), f"with {OVERLAP[0]}, whose schedule"),
        ("hybrid", 2, (*MTP, DEFER), f"{DEFER} needs Transformer Engine"),
    ],
)
def test_flags_that_do_not_fit_the_model_or_its_layout(
    checkpoint: Path, ranks: int, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(checkpoint, *flags, world_size=ranks)


def test_flags_that_fit_the_model_and_its_layout(dense: Path, moe: Path) -> None:
    assert parsed(moe, *TP2, "--sequence-parallel", world_size=2).args.moe_router_topk == 3
    assert parsed(dense, "--optimizer", "lion").args.optimizer == "lion"
    assert parsed(moe, *OVERLAP, "--bf16", world_size=2).args.overlap_moe_expert_parallel_comm
    virtual = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
    four = (*virtual, "--global-batch-size", "4")
    parallel = parsed(moe, *OVERLAP, "--bf16", *four, world_size=4).settings.parallel
    assert parallel.virtual_pipeline_model_parallel_size == 2
    fixed = (*GATHER, *EP2, "--seq-length", "64")
    assert parsed(moe, *fixed, world_size=2).args.moe_token_dispatcher_type == "allgather"
    types = parsed(
        moe, *BALANCE, "seq_aux_loss", "global_aux_loss", "--moe-aux-loss-coeff", "1", "2"
    )
    assert types.args.moe_aux_loss_coeff == [1, 2]
    flex = parsed(moe, *FLEX, *EP2, "--bf16", world_size=2)
    assert flex.args.moe_token_dispatcher_type == "flex"


def test_no_deterministic_gradients_of_the_largest_heads(dense: Path) -> None:
    """Of smaller heads FlashAttention 3 has some, and FlashAttention 2 of all."""
    settings, architecture = parsed(dense).settings, Architecture.from_hf(dense)
    large = replace(architecture, head_dim=256)

    def check(architecture: Architecture, **flags: Any) -> None:
        checks.check(replace(settings, compute=replace(settings.compute, **flags)), architecture)

    with pytest.raises(BadInput, match="--deterministic-mode with --flash-attention-version 3: "):
        check(large, deterministic_mode=True, flash_attention_version=3)
    check(large, deterministic_mode=True)
    check(large, flash_attention_version=3)
    check(architecture, deterministic_mode=True, flash_attention_version=3)


def test_mtp_is_trained_with_positions_of_three_axes(hybrid: Path) -> None:
    """Megatron's own check refuses them."""
    made = parsed(hybrid, *MTP)
    assert made.settings.loop.mtp_num_layers == made.args.trained_mtp_layers == 1
    assert made.settings.loop.mtp_loss_scaling_factor == 0.1
    assert parsed(hybrid).settings.loop.mtp_num_layers is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "No training data: give --data-path"),
        (("--data-path", "gone.jsonl"), "gone.jsonl does not exist"),
        (("--data-path", "{here}", "--valid-data-path", "gone"), "gone does not exist"),
        (("--data-path", "0.3", "{here}", "0.7"), "weights and paths in turn"),
        (("--data-path", "{here}", "--wandb-project", "x"), "Add --tensorboard-dir"),
    ],
)
def test_what_the_run_will_want_is_looked_for_first(
    flags: tuple[str, ...], message: str, dense: Path
) -> None:
    settings = parsed(dense, *(flag.format(here=dense) for flag in flags)).settings
    with pytest.raises(BadInput, match=message):
        check_surroundings(settings)


def test_a_checkpoint_of_the_other_kind(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    data = ("--data-path", str(dense))
    for flag, path, message in (
        ("--load", dense, "a Megatron-Core one is needed here: use --load-hf"),
        ("--load-hf", tmp_path, "a Hugging Face one is needed here: use --load"),
    ):
        with pytest.raises(BadInput, match=message):
            check_surroundings(parsed(dense, *data, flag, str(path)).settings)


def test_a_place_without_a_checkpoint_is_refused(dense: Path, tmp_path: Path) -> None:
    data, empty = ("--data-path", str(dense)), str(tmp_path)
    for flag in ("--load", "--pretrained-checkpoint"):
        with pytest.raises(BadInput, match=f"holds no checkpoint .* path of {flag}"):
            check_surroundings(parsed(dense, *data, flag, empty).settings)
    check_surroundings(
        parsed(dense, *data, "--load", empty, "--save", empty, "--save-interval", "5").settings
    )


def test_all_that_is_missing_is_said_at_once(dense: Path) -> None:
    wanted = r"No training data: .* No length of the run: give --train"
    with pytest.raises(BadInput, match=wanted):
        check_early(CommandLine(["--cpu", "--hf-model", str(dense)]))
    with pytest.raises(BadInput, match=r"No model: give --hf-model DIR.* " + wanted):
        check_early(CommandLine(["--cpu"]))


def test_a_dispatcher_that_is_not_installed(dense: Path) -> None:
    argv = ["--cpu", "--hf-model", str(dense), "--data-path", str(dense), "--train-iters", "1"]
    with pytest.raises(BadInput, match="flex needs the package deep_ep"):
        check_early(CommandLine([*argv, "--moe-token-dispatcher-type", "flex"]))


@pytest.mark.parametrize(
    ("backend", "files", "message"),
    [
        ("deepep", ("utils.py",), None),
        ("hybridep", ("utils.py", "hybrid_ep_buffer.py"), None),
        ("hybridep", ("utils.py",), "no HybridEPBuffer. Build DeepEP from its branch hybrid-ep"),
        ("deepep", ("utils/__init__.py",), "is DeepEP 2, .* Build DeepEP 1.2.1"),
    ],
)
def test_a_deepep_without_what_megatron_needs(
    backend: str,
    files: tuple[str, ...],
    message: str | None,
    moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__init__.py", *files):
        file = tmp_path / "deep_ep" / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("raise RuntimeError('there is no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = parsed(
        moe, "--data-path", str(moe), "--train-iters", "1", *FLEX, *EP2, "--bf16",
        "--moe-flex-dispatcher-backend", backend, world_size=2,
    )  # fmt: skip
    with nullcontext() if message is None else pytest.raises(BadInput, match=message):
        check_deep_ep(run.settings.compute.moe_flex_dispatcher_backend)


def test_a_number_of_epochs_is_the_only_length(dense: Path) -> None:
    argv = ["--cpu", "--hf-model", str(dense), "--data-path", str(dense)]
    for flags, message in (
        (["--num-epochs", "0"], "--num-epochs is 0; it is at least 1"),
        (["--num-epochs", "2", "--train-iters", "3"], "and --train-iters both set the length"),
    ):
        with pytest.raises(BadInput, match=message):
            check_surroundings(CommandLine([*argv, *flags]).settings)
    check_surroundings(CommandLine([*argv, "--num-epochs", "2"]).settings)
    ramp = ["--rampup-batch-size", "1", "1", "8", "--global-batch-size", "8", "--lr", "1"]
    with pytest.raises(BadInput, match=r"--rampup-batch-size: .*Give --train-samples N"):
        validate([*argv, "--num-epochs", "2", *ramp], 1)


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
        (
            ["--train-iters", "3", "--save", "new", "--exit-on-missing-checkpoint"],
            "new holds no checkpoint to go on from. To begin a run, leave it out",
        ),
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
