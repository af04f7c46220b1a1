"""The checkpoint's config decides the architecture, and the user's flags everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl import kernels
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.kernels import why_eager
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import statement_of_defaults
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.data_provider import data_config
from mcore_qwen3vl.training.logs.summary import summary
from tests.training.arguments.commands import TP2, parsed


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


@pytest.mark.parametrize(("value", "runs"), [("1", False), ("0", True)])
def test_a_user_can_take_the_eager_code(
    value: str, runs: bool, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCORE_QWEN3VL_EAGER", value)
    monkeypatch.setenv("CC", "/elsewhere/cc")
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    argv = ["--hf-model", str(moe), "--train-iters", "20", "--spec", "torch", "--data-path", "a"]
    run = validate(argv, 1)
    why_eager.cache_clear()
    rows = dict(summary(run.settings, Architecture.from_hf(moe), {}))
    assert kernels.run_on(torch.empty(1)) == runs
    why_eager.cache_clear()
    assert rows.get("kernels") == (None if runs else "not fused: MCORE_QWEN3VL_EAGER=1")


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
