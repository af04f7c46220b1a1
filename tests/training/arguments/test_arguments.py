"""The checkpoint's config decides the architecture, and the user's flags everything else."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.kernels import why_eager
from mcore_qwen3vl.megatron_config import (
    architecture_arguments,
    config_fields,
    recommended_arguments,
)
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.tiny import tiny_config, write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.checks import (
    check_deep_ep,
    check_early,
    check_surroundings,
    unused_data_flags,
)
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.parser import Parsed, validate
from mcore_qwen3vl.training.arguments.settings import statement_of_defaults
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.data_provider import data_config
from mcore_qwen3vl.training.logs.summary import summary
from mcore_qwen3vl.training.model import fields_from_flags

KEPT = ("--keep-best", "--save", "run")
VALIDATION = ("--valid-data-path", "v.jsonl", "--eval-iters", "1")
BASE = (
    *("--cpu", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--train-iters", "3", "--lr", "1"),
)


def parsed(model: Path, *flags: str, world_size: int = 1) -> Parsed:
    return validate(["--hf-model", str(model), *BASE, *flags], world_size)


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-layers", "5"),
        ("--hidden-size", "64"),
        ("--rotary-base", "1000000"),
        ("--num-query-groups", "2"),
        ("--position-embedding-type", "rope"),
        ("--norm-epsilon", "1e-5"),
        ("--num-experts", "8"),
        ("--untie-embeddings-and-output-weights",),
        ("--moe-router-score-function", "sigmoid"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    moe = flags[0].startswith("--moe")
    model = write_tiny_checkpoint(tmp_path, moe=moe, tie=not moe)
    with pytest.raises(BadInput, match=rf"{flags[0]} sets .* leave these flags out"):
        parsed(model, *flags)


def test_a_flag_that_agrees_with_the_checkpoint_is_fine(dense: Path) -> None:
    assert parsed(dense, "--num-layers", "4", "--swiglu").args.num_layers == 4


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
TP2 = ("--tensor-model-parallel-size", "2")
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
FIRST = ("--moe-expert-capacity-factor", "1", "--moe-token-drop-policy", "position")
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
        # Further tokens.
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


@pytest.mark.parametrize(
    "flags",
    [
        ("--moe-router-force-load-balancing",),
        ("--moe-router-force-biased", "1"),
        ("--moe-pad-expert-input-to-capacity",),
        ("--moe-router-quantile-balancing-ema", "0.5"),
        ("--moe-apply-probs-on-input",),
        ("--moe-mlp-glu-interleave-size", "8"),
    ],
)
def test_what_would_route_or_compute_otherwise_is_refused(
    flags: tuple[str, ...], moe: Path
) -> None:
    with pytest.raises(BadInput, match=f"^{flags[0]}: "):
        CommandLine(["--hf-model", str(moe), *BASE, *flags]).check_names()


def test_flags_about_experts_are_named_for_a_model_without(dense: Path, moe: Path) -> None:
    def unused(model: Path, *flags: str) -> list[str]:
        return [str(u) for u in CommandLine(["--hf-model", str(model), *BASE, *flags]).unused()]

    (line,) = unused(dense, "--moe-z-loss-coeff", "1")
    assert "--moe-z-loss-coeff" in line
    assert "the model has no experts" in line
    assert not unused(moe, "--moe-z-loss-coeff", "1")
    (line,) = unused(moe, "--moe-token-drop-policy", "position")
    assert "it acts with --moe-expert-capacity-factor" in line
    assert not unused(moe, *FIRST)


def test_a_further_token_is_trained_with_positions_of_three_axes(hybrid: Path) -> None:
    """Megatron's own check refuses them."""
    made = parsed(hybrid, *MTP)
    assert made.settings.loop.mtp_num_layers == made.args.trained_mtp_layers == 1
    assert made.settings.loop.mtp_loss_scaling_factor == 0.1
    assert parsed(hybrid).settings.loop.mtp_num_layers is None


def test_experts_are_one_product(moe: Path, dense: Path) -> None:
    assert parsed(moe).args.moe_grouped_gemm
    assert not parsed(dense).args.moe_grouped_gemm


def test_the_router_loss_comes_from_the_config_unless_given(moe: Path) -> None:
    assert parsed(moe).args.moe_aux_loss_coeff == 0.001
    assert parsed(moe, "--moe-aux-loss-coeff", "0").args.moe_aux_loss_coeff == 0


@pytest.mark.parametrize(
    ("flags", "balanced"),
    [
        (("--packing",), True),
        ((), False),
        (("--packing", "--no-balance"), False),
        (("--packing", "--loss", "dpo", "--lora-rank", "2", "--lora-target", "language"), False),
    ],
)
def test_packs_are_balanced_unless_told_otherwise(
    flags: tuple[str, ...], balanced: bool, dense: Path
) -> None:
    assert data_config(parsed(dense, *flags).settings).balance == balanced


def test_the_command_that_saves_resumes(dense: Path, tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path), "--save-interval", "5")
    assert parsed(dense, *saving).args.load == str(tmp_path)
    assert parsed(dense, *saving, "--load", "elsewhere").args.load == "elsewhere"


def test_sequence_length_must_divide_by_the_layout(dense: Path) -> None:
    layout = (*TP2, "--sequence-parallel", "--context-parallel-size", "2")
    settings = parsed(dense, *layout, "--packing", world_size=4).settings
    assert data_config(settings).length_multiple == 4  # CP divides each sample, and SP the pack
    with pytest.raises(BadInput, match="not a multiple of 4"):
        data_config(replace(settings, data=replace(settings.data, seq_length=126)))


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, 128),
    ],
)
def test_rows_fit_the_products_of_quantized_layers(
    recipe: dict[str, str], tokens: int, dense: Path
) -> None:
    """Rows are padded to them: TE refuses other numbers of local tokens in the middle of a run."""
    layout = (*TP2, "--sequence-parallel", "--seq-length", "256")
    settings = parsed(dense, *layout, "--pad-to-longest", world_size=2).settings
    assert data_config(settings).length_multiple == 2
    settings = replace(settings, compute=replace(settings.compute, **recipe))  # type: ignore[arg-type]
    assert data_config(settings).padded(3) == 2 * tokens
    packed = replace(settings.data, packing=True, pad_to_longest=False)
    # For a sample; a pack has the full length.
    assert data_config(replace(settings, data=packed)).length_multiple == 1
    uneven = replace(settings.data, seq_length=2 * tokens + 2)
    with pytest.raises(BadInput, match=f"multiple of {2 * tokens}, .*on each rank"):
        data_config(replace(settings, data=uneven))


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


def test_what_is_not_given_has_a_default_and_is_stated(dense: Path, tmp_path: Path) -> None:
    argv = ["--cpu", "--hf-model", str(dense), "--train-iters", "20", "--save", str(tmp_path)]
    run = validate(argv, 2)
    assert run.args.exit_signal_handler
    assert statement_of_defaults(run.settings, {"train_iters", "save"}) == (
        "--micro-batch-size 1 --global-batch-size 2 --seq-length 4096 --lr 1e-05 "
        "--log-interval 10 --save-interval 500 --pad-to-longest"
    )
    args = validate([*argv, "--lr", "1", "--seq-length", "64"], 1).args
    assert (args.lr, args.seq_length, args.pad_to_longest) == (1, 64, False)


def test_half_precision_is_the_default_on_gpus(dense: Path) -> None:
    """Fused attention has no float32, and unfused attention needs memory for length squared."""
    argv = ["--hf-model", str(dense), "--train-iters", "20", "--spec", "torch"]
    run = validate(argv, 1)
    assert run.args.params_dtype == torch.bfloat16
    assert " --bf16" in (statement_of_defaults(run.settings, {"train_iters"}) or "")
    assert " --bf16" not in (
        statement_of_defaults(validate([*argv, "--bf16"], 1).settings, {"bf16"}) or ""
    )
    for flags, dtype in ((["--fp32"], torch.float32), (["--fp16"], torch.float16)):
        run = validate([*argv, *flags], 1)
        assert run.args.params_dtype == dtype
        assert "--bf16" not in (statement_of_defaults(run.settings, {}) or "")
    assert validate([*argv, "--cpu"], 1).args.params_dtype == torch.float32
    with pytest.raises(BadInput, match="--fp32 and --fp16 contradict each other"):
        validate([*argv, "--fp32", "--fp16"], 1)


def test_kernels_that_need_a_compiler_are_refused_without(
    moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--hf-model", str(moe), "--train-iters", "20", "--spec", "torch", "--data-path", "a"]
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    run = validate(argv, 1)
    why_eager.cache_clear()
    rows = dict(summary(run.settings, Architecture.from_hf(moe), {}))
    why_eager.cache_clear()
    assert rows["kernels"] == "not fused: there is no C compiler (CC, gcc, clang)"
    assert not run.args.compile_pointwise
    with pytest.raises(BadInput, match=r"--compile-pointwise needs a C compiler"):
        validate([*argv, "--compile-pointwise"], 1)
    monkeypatch.setenv("CC", "/elsewhere/cc")
    assert validate([*argv, "--compile-pointwise"], 1).args.compile_pointwise
    assert "kernels" not in dict(summary(run.settings, Architecture.from_hf(moe), {}))


def test_pointwise_kernels_are_compiled_on_gpus_with_a_compiler(
    moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--hf-model", str(moe), "--train-iters", "20", "--spec", "torch", "--data-path", "a"]
    monkeypatch.setenv("CC", "/elsewhere/cc")
    run = validate(argv, 1)
    assert run.args.compile_pointwise
    assert " --compile-pointwise" in (statement_of_defaults(run.settings, {}) or "")
    for flag in ("--no-compile-pointwise", "--cpu"):
        run = validate([*argv, flag], 1)
        assert not run.args.compile_pointwise
        assert "--compile-pointwise" not in (statement_of_defaults(run.settings, {}) or "")


def test_a_resumed_run_keeps_its_global_batch(dense: Path, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path))
    assert parsed(dense, *save, world_size=2).args.global_batch_size == 2  # nothing to resume
    folder = data_state.folder_of(tmp_path, 7)
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    place = {"world_size": 2, "num_workers": 2}
    torch.save(place, folder / "rank_00000.pt")  # earlier versions saved no batch size
    assert parsed(dense, *save, world_size=2).args.global_batch_size == 2
    torch.save({**place, "global_batch_size": 4}, folder / "rank_00000.pt")
    for ranks in (1, 2, 4):
        run = parsed(dense, *save, world_size=ranks)
        assert (run.args.global_batch_size, run.args.data_parallel_size) == (4, ranks)
        assert run.settings.kept_batch
        assert run.args.num_workers * ranks == 4
    assert parsed(dense, "--load", *save[1:], "--finetune").args.global_batch_size == 1
    run = parsed(dense, *save, "--global-batch-size", "6", world_size=2)
    assert (run.args.global_batch_size, run.settings.kept_batch) == (6, False)
    for flags, message, ranks in (
        (["--num-workers", "2"], r"micro-batch 1, add --num-workers 1\.", 4),
        (
            ["--num-workers", "2"],
            r"saved by 2 data-parallel ranks with 2 data workers each, and a global batch of 4\. "
            r"To go on with 1 data-parallel rank of micro-batch 1, add --num-workers 4\.",
            1,
        ),
        (
            ["--num-workers", "2", "--micro-batch-size", "3"],
            r"add --global-batch-size 12 --override-opt-param-scheduler --num-workers 1\.",
            4,
        ),
        ([], r"over 3 data-parallel ranks: use 1 or 2 or 4, or .* --finetune, and another", 3),
    ):
        with pytest.raises(BadInput, match=message):
            parsed(dense, *save, *flags, world_size=ranks)
    torch.save({**place, "balance": True, "global_batch_size": 4}, folder / "rank_00000.pt")
    assert parsed(dense, *save, "--packing", world_size=4).args.num_workers == 2


def test_the_packing_buffer_grows_with_the_packs_and_is_kept_by_a_run(tmp_path: Path) -> None:
    """Checkpoints of versions where it was 128 for all lengths go on with the packs they began."""
    model = write_tiny_checkpoint(tmp_path / "hf", text={"max_position_embeddings": 32768})
    save = tmp_path / "run"
    flags = ("--packing", "--save", str(save), "--seq-length")

    def buffer(length: int, *others: str) -> int:
        run = parsed(model, *flags, str(length), *others)
        assert run.args.packing_buffer == run.settings.data.buffer
        stated = statement_of_defaults(run.settings, run.explicit) or ""
        assert (f"--packing-buffer {run.settings.data.buffer} " in stated) == (not others)
        return run.settings.data.buffer

    assert [buffer(length) for length in (64, 8192, 12288, 32768)] == [128, 128, 192, 512]
    assert buffer(32768, "--packing-buffer", "7") == 7
    folder = data_state.folder_of(save, 7)
    folder.mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text("7")
    torch.save({"world_size": 1, "num_workers": 2, "balance": True}, folder / "rank_00000.pt")
    assert buffer(32768) == 128  # saved without a record
    for recorded in (128, 300):
        rows = {"packs": {"packing": True, "packing_buffer": recorded, "seq_length": 32768}}
        (folder / "run.json").write_text(json.dumps({"rows": rows}))
        assert buffer(32768) == recorded
        assert buffer(32768, "--packing-buffer", "512") == 512  # which the contract refuses
    again = parsed(model, "--packing", "--load", str(save), "--finetune", *flags[3:], "32768")
    assert again.settings.data.buffer == 512


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


def test_what_no_rank_uses_is_named(dense: Path) -> None:
    data = ("--data-path", "a.jsonl", "--shuffle-buffer", "7")
    valid = ("--valid-data-path", "0.3", "a.jsonl", "0.7", "b.jsonl")
    settings = parsed(dense, *data, *valid).settings
    named = unused_data_flags(settings, {"shuffle_buffer", "valid_data_path"})
    assert [item.name for item in named] == ["--shuffle-buffer", "weight"]
    loop = replace(settings.loop, train_samples=10, global_batch_size=4, valid_data_path=None)
    (rest,) = unused_data_flags(replace(settings, loop=loop), set())
    assert rest.name == "the last 2 of --train-samples"
    tars = parsed(dense, "--data-path", "tars", "--shuffle-buffer", "7")
    assert unused_data_flags(tars.settings, {"shuffle_buffer"}) == []


def test_one_rank_of_a_node_reports_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_qwen3vl.training.__main__ import entry

    monkeypatch.setattr("mcore_qwen3vl.training.__main__._end_process", sys.exit)
    monkeypatch.setattr("sys.argv", ["train", "--cpu", "--hf-model", str(tmp_path / "gone")])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for rank in range(2):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit) as left:
            entry()
        assert left.value.code == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_without_torchrun_there_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_qwen3vl.training.__main__ import entry

    monkeypatch.setattr("mcore_qwen3vl.training.__main__._end_process", sys.exit)
    monkeypatch.setattr("sys.argv", ["train.py", "--cpu"])
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SystemExit) as left:
        entry()
    assert left.value.code == 2
    assert "torchrun, or train on this machine with `mcore-qwen3vl train`" in (
        capsys.readouterr().err
    )


MODELS = {
    "dense": {},
    "tied": {"tie": True},
    "moe": {"moe": True},
    "mixed": {"moe": True, "text": {"mlp_only_layers": [1]}},
    "moe without a MoE layer": {"moe": True, "text": {"mlp_only_layers": [0, 1, 2, 3]}},
}
DIFFERENT = {
    "calculate_per_token_loss": "training divides by the trained tokens of the global batch",
    "moe_aux_loss_coeff": "training balances the experts, as far as there are any",
    "inference_sampling_seed": "Megatron passes --seed on",
    "gradient_accumulation_fusion": "training has a buffer that products add gradients to",
    "cp_comm_type": "Megatron spells its default out",
    "tensor_parallel_num_weight_shards": "Megatron spells its default out",
    "expert_tensor_parallel_num_weight_shards": "Megatron spells its default out",
}
"""Fields that differ between the two, and why."""


@pytest.mark.parametrize("model", MODELS)
def test_flags_and_config_describe_one_model(model: str, tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_tiny_checkpoint(tmp_path, **MODELS[model]))
    sizes = ["--seq-length", "128", "--micro-batch-size", "1", "--train-iters", "3", "--lr", "1"]
    args = validate(["--hf-model", str(tmp_path), "--cpu", *sizes], world_size=1).args
    from_flags = values(transformer_config(architecture, **fields_from_flags(args)))
    direct = values(transformer_config(architecture, params_dtype=args.params_dtype))
    expected = {*DIFFERENT} - (set() if any(architecture.moe_layers) else {"moe_aux_loss_coeff"})
    assert {name for name in direct if direct[name] != from_flags[name]} == expected
    assert args.untie_embeddings_and_output_weights == (not architecture.tie_word_embeddings)
    assert args.rotary_base == architecture.rope_theta


def values(config: Any) -> dict[str, Any]:
    """Return the config's fields, with partial functions as tuples that can be compared."""
    return {
        name: (value.func, value.args, value.keywords)
        if isinstance(value, functools.partial)
        else value
        for name, value in vars(config).items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_name_is_one_that_megatron_knows(model: str) -> None:
    from argparse import ArgumentParser

    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    architecture = Architecture.from_hf(tiny_config(**MODELS[model]))
    known = {action.dest for action in add_megatron_arguments(ArgumentParser())._actions}
    fixed, free = architecture_arguments(architecture), recommended_arguments(architecture)
    assert {*fixed, *free} <= known
    assert not {*fixed} & {*free}
    assert {*config_fields(architecture)} <= {*TransformerConfig.__dataclass_fields__}


def test_a_rank_that_fails_ends_before_the_interpreter_destroys_its_threads(tmp_path: Path) -> None:
    """Gloo's threads may abort the process there, when other ranks have ended."""
    program = """
import atexit, os, sys
from pathlib import Path

class Thread:
    def __del__(self, abort=os.abort):
        abort()

thread = Thread()
atexit.register(Path("ended").touch)
sys.argv = ["train"]
os.environ.pop("MASTER_ADDR", None)
from mcore_qwen3vl.training.__main__ import entry
entry()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "one rank of a run. Start it with torchrun" in ran.stderr
    assert ran.returncode == 2
    assert (tmp_path / "ended").exists()
