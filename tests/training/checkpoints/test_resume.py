"""A stopped run continues bit for bit under the same layout, and closely under another."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.converters.hf.companions import companion_files
from mcore_qwen3vl.data import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.verification.curves import (
    DISTRIBUTED,
    OTHER_LAYOUT,
    Job,
    curve_of,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.converters.checkpoints import assert_same_tensors
from tests.training.log import numbers_of
from tests.turns import slow_except

STEPS, HALF = 4, 2
FIRST_STAGE = ("--freeze", "language")
LAST_STAGE = ("--trainable", "decoder.final_layernorm", "output_layer")
LAST, BEFORE = f"iter_{STEPS:07d}", f"iter_{HALF:07d}"


def job(checkpoint: Path, data: Path, layout: str, *flags: str) -> Job:
    return Job(checkpoint, data, Layout.parse(layout), steps=STEPS, batch=2, flags=flags)


@pytest.mark.parametrize(
    ("is_moe", "layout", "flags"),
    [
        # "DP2 to TP2" below restores what TP divides, too.
        pytest.param(False, "tp2+sp", ("--packing",), marks=pytest.mark.slow),
        # ep2xdp2 below shards its dense parameters over DP 2 in the same way.
        pytest.param(False, "dp2", DISTRIBUTED, marks=pytest.mark.slow),
        (True, "ep2xdp2", DISTRIBUTED),
    ],
)
def test_same_layout_continues_bit_for_bit(
    is_moe: bool, layout: str, flags: tuple[str, ...], dense: Path, moe: Path, data: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = job(moe if is_moe else dense, data, layout, *flags)
    whole, save = train_and_rewind(run, tmp_path)
    rest = train(run, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    assert numbers_of(rest) == numbers_of(whole[HALF:])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("tp2+sp", ()), ("pp2", ()), marks=pytest.mark.slow),
        pytest.param(
            ("dp2", (*DISTRIBUTED, "--num-workers", "1")),
            ("tp2+sp", ("--use-distributed-optimizer", "--num-workers", "2")),
            marks=pytest.mark.slow,
        ),
        pytest.param(("pp2+E|t|tt|tL", ()), ("pp2+Ettt|tL", ()), marks=pytest.mark.slow),
        pytest.param(
            ("single", (*DISTRIBUTED, *FIRST_STAGE)),
            ("pp2", (*DISTRIBUTED, *FIRST_STAGE)),
            marks=pytest.mark.slow,
        ),
        (  # the first rank, whose count of steps is saved, trains nothing
            ("pp2", (*DISTRIBUTED, *LAST_STAGE)),
            ("single", (*DISTRIBUTED, *LAST_STAGE)),
        ),
        (("pp2", ("--bf16", *FIRST_STAGE)), ("pp2", ("--bf16", *FIRST_STAGE))),
        (("pp2", ("--bf16", *LAST_STAGE)), ("pp2", ("--bf16", *LAST_STAGE))),
        pytest.param(("pp2", LAST_STAGE), ("single", LAST_STAGE), marks=pytest.mark.slow),
        pytest.param(  # balanced packs of two ranks continue on one rank in the same order
            ("dp2", (*DISTRIBUTED, "--packing")),
            ("single", ("--use-distributed-optimizer", "--packing")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "TP2 to PP2",
        "DP2 to TP2",
        "one split to another",
        "first stage alone",
        "last stage alone",
        "first stage alone, bf16",
        "last stage alone, bf16",
        "last stage alone, undivided states",
        "DP2 to one",
    ],
)
def test_another_layout_continues_closely(
    before: tuple[str, tuple[str, ...]], after: tuple[str, tuple[str, ...]], dense: Path,
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    whole, save = train_and_rewind(job(dense, data, before[0], *before[1]), tmp_path)
    other = job(dense, data, after[0], *after[1])
    rest = train(other, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    difference = worst_difference(curve_of(rest), curve_of(whole[HALF:]))
    assert difference.loss <= OTHER_LAYOUT
    assert difference.grad_norm <= OTHER_LAYOUT


PARTS = ("--freeze", "vision", "--aligner-lr-mult", "0.5")
"""Parts with a rate of their own, which only the first stage of a pipeline has."""


@pytest.mark.parametrize(
    ("kind", "flags", "before", "after"),
    slow_except(
        [
            ("moe", (), "single", "ep2xdp2"),
            ("moe", (), "ep2xdp2", "single"),
            ("moe", (), "ep2xdp2", "tp2+sp"),
            ("moe", (), "tp2xetp2+sp", "ep2xdp2"),
            ("moe", ("--lora-rank", "2"), "single", "ep2xdp2"),
            ("moe", ("--lora-rank", "2"), "ep2xdp2", "single"),
            ("moe", ("--bf16",), "single", "ep2xdp2"),
            ("moe", ("--bf16",), "pp2", "ep2xdp2"),
            ("moe", PARTS, "single", "ep2xdp2"),
            ("moe", PARTS, "pp2xep2xdp2", "single"),
            ("dense", PARTS, "single", "pp2"),
            ("hybrid_moe", (), "ep2xdp2", "tp2+sp"),
        ],
        ("moe", (), "single", "ep2xdp2"),
        ("moe", PARTS, "pp2xep2xdp2", "single"),
    ),
)
def test_without_the_distributed_optimizer_experts_and_parts_continue_elsewhere(
    checkpoint: Path, flags: tuple[str, ...], before: str, after: str, data: Path, tmp_path: Path
) -> None:
    """Megatron has an optimizer of their own for experts that EP divides, and groups for rates."""
    whole, save = train_and_rewind(job(checkpoint, data, before, *flags), tmp_path)
    other = job(checkpoint, data, after, *flags)
    rest = train(other, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    difference = worst_difference(curve_of(rest), curve_of(whole[HALF:]))
    limit = OTHER_LAYOUT if "--bf16" not in flags else 3e-3  # 1e-3 on two x86 cores
    assert difference.loss <= limit
    assert difference.grad_norm <= limit


def test_under_a_split_of_its_own_a_run_saves_and_exports_what_it_holds(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    budgets = ("--image-max-pixels", "1024", "--video-max-frames", "4")
    flags = ("--lr", "0", "--weight-decay", "0", *budgets)
    still = replace(job(dense, data, "pp2+E|t|tt|tL", *flags), steps=1)
    save, hf = tmp_path / "save", tmp_path / "hf"
    train(still, tmp_path, "--save", str(save), "--save-interval", "1", "--save-hf", str(hf))
    saved = RunRecord.of_checkpoint(save, 1)
    assert saved is not None
    assert saved.value("batch", "global_batch_size") == still.batch
    (live,) = (folder.parent for folder in hf.rglob("config.json"))
    mcore_to_hf(save, tmp_path / "back", hf_config=dense)
    assert_same_tensors(dense, live)
    assert_same_tensors(dense, tmp_path / "back")
    for written in (live, save / "hf"):
        processor = load_processor(written)
        assert processor.image_processor.size["longest_edge"] == 1024
        assert processor.video_processor.max_frames == 4


def test_sigterm_saves_and_the_same_command_goes_on(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    run = replace(job(dense, data, "single", "--num-workers", "1"), steps=16)
    flags = ("--save", str(tmp_path / "save"), "--save-interval", "1000", "--exit-signal-handler")
    whole = train(run, tmp_path / "whole")
    stopper = threading.Thread(target=terminate_after_two_steps, args=(tmp_path / "first",))
    stopper.start()
    first = train(run, tmp_path / "first", *flags)
    stopper.join()
    assert 2 <= len(first) < run.steps
    rest = train(run, tmp_path / "rest", *flags)
    assert rest[0]["iteration"] == len(first) + 1
    assert numbers_of(first + rest) == numbers_of(whole)


def terminate_after_two_steps(folder: Path) -> None:
    """Send SIGTERM to the rank and its data worker, as torchrun does, after two steps."""
    log, deadline = folder / "log.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().count("\n") >= 2:
            rank = psutil.Process(_child())
            (worker,) = (c for c in rank.children() if c.name() == "pt_data_worker")
            for process in (worker, rank):
                process.send_signal(signal.SIGTERM)
            return
        time.sleep(0.01)


def _child() -> int:
    """Return the process id of the one rank that this process has forked."""
    import multiprocessing

    (rank,) = multiprocessing.active_children()
    assert rank.pid is not None
    return rank.pid


@pytest.fixture(scope="module")
def two_checkpoints(
    dense: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, Path, list[dict[str, Any]]]:
    """Return a finished run that saved halfway and at the end, for tests to damage copies."""
    folder = tmp_path_factory.mktemp("saved")
    run = job(dense, data, "single")
    flags = ("--save", str(folder / "save"), "--save-interval", str(HALF))
    return run, folder / "save", train(run, folder / "whole", *flags)


def truncate(folder: Path) -> None:
    largest = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as stream:
        stream.truncate(largest.stat().st_size // 2)


def blank(folder: Path) -> None:
    largest = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.parametrize("spoil", [truncate, blank, lose_metadata])
def test_a_damaged_checkpoint_is_named(
    spoil: Any, two_checkpoints: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    from mcore_qwen3vl.settings.run import CheckpointSettings
    from mcore_qwen3vl.training.checkpoints.damage import find_damage
    from mcore_qwen3vl.training.checkpoints.resume import newest_readable_iteration, resumed_step

    save = tmp_path / "save"
    shutil.copytree(two_checkpoints[1], save)
    assert find_damage(save / LAST) is None
    assert newest_readable_iteration(save, fallback=False) == STEPS
    spoil(save / LAST)
    assert newest_readable_iteration(save, fallback=True) == HALF
    asked = CheckpointSettings(load=str(save), ckpt_format="torch_dist")
    assert resumed_step(asked, fallback=True) == HALF  # its data state counts the steps that remain
    assert resumed_step(asked) == STEPS
    with pytest.raises(BadInput, match=rf"iteration {STEPS}: .*--on-corrupt-checkpoint fallback"):
        newest_readable_iteration(save, fallback=False)
    spoil(save / BEFORE)
    with pytest.raises(BadInput, match=f"iteration {HALF}: "):
        newest_readable_iteration(save, fallback=True)


def test_training_falls_back_to_the_checkpoint_before_or_stops(
    two_checkpoints: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run, saved, whole = two_checkpoints
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    truncate(save / LAST)
    flags = ("--save", str(save), "--save-interval", str(HALF))
    with pytest.raises(BadInput, match=f"iteration {STEPS}: "):
        train(run, tmp_path / "stop", *flags, "--on-corrupt-checkpoint", "stop")
    again = train(run, tmp_path / "again", *flags)
    assert numbers_of(again) == numbers_of(whole[HALF:])
    assert "the latest checkpoint is damaged" in (tmp_path / "again" / "output.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--lr-warmup-iters", "1"),
            r"a warm-up of 0 steps, 0 samples, .* of 1 steps, 2 samples. .*--override-opt",
        ),
        (("--lr", "7e-4"), r"--lr \S+, and this command --lr 0.0007. .*--load .* --finetune"),
        (("--ckpt-step", "1"), "saved without 'optimizer'. Add --no-load-optim to go on"),
        (
            ("--ckpt-step", "1", "--trainable", "language"),
            "holds no .*weight, which .* add --no-load-optim, .*--finetune",
        ),
        (("--freeze", r"decoder\.layers\.0\."), "trains in some layers .* add --no-save-optim"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_flags_is_explained(
    flags: tuple[str, ...], message: str, two_checkpoints: tuple[Job, Path, list[dict[str, Any]]],
    tmp_path: Path,
) -> None:  # fmt: skip
    run, saved, _ = two_checkpoints
    save = tmp_path / "save"
    if flags[0] == "--ckpt-step":
        saving = ("--save", str(save), "--save-interval", "1")
        saving += ("--freeze", "language") if "--trainable" in flags else ("--no-save-optim",)
        train(replace(run, steps=1), tmp_path / "first", *saving)
    else:
        shutil.copytree(saved, save)
    with pytest.raises(BadInput, match=message):
        train(run, tmp_path / "again", "--save", str(save), "--save-interval", str(HALF), *flags)


def test_a_resumed_run_may_train_less_and_says_so(
    two_checkpoints: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run, saved, whole = two_checkpoints
    flags = ("--load", str(saved), "--ckpt-step", str(HALF))
    rest = train(run, tmp_path / "again", *flags, "--freeze", "vision")
    assert rest[0]["lm loss"] == whole[HALF]["lm loss"]
    said = (tmp_path / "again" / "output.txt").read_text()
    assert "what trains: --freeze vision in place of no --freeze" in said
    train(run, tmp_path / "same", *flags)
    assert "what trains" not in (tmp_path / "same" / "output.txt").read_text()


@pytest.mark.slow
def test_other_data_are_not_taken_for_those_of_the_checkpoint(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    save, other = tmp_path / "save", data.with_name("other.jsonl")
    other.write_text("".join(data.read_text().splitlines(keepends=True)[:20]))
    flags = ("--save", str(save), "--save-interval", "100")
    run = job(dense, data, "single", *flags)
    train(run, tmp_path / "first", "--exit-interval", "2")
    said = rf"begun on train.jsonl \(.* bytes\), and this command names other.jsonl .*--load {save}"
    with pytest.raises(BadInput, match=said):
        train(replace(run, data=other), tmp_path / "other")
    shutil.copy(data, data.with_name("renamed.jsonl"))
    rest = train(replace(run, data=data.with_name("renamed.jsonl")), tmp_path / "rest")
    assert [entry["iteration"] for entry in rest] == [3, 4]


def test_a_trained_checkpoint_is_exported_as_it_is(
    two_checkpoints: tuple[Job, Path, list[dict[str, Any]]], dense: Path, tmp_path: Path
) -> None:
    """Config, tokenizer and processor come along, whichever folder of the checkpoint is named."""
    save = two_checkpoints[1]
    assert not list(save.glob(".hf.*"))
    companions = {name: file.read_bytes() for name, file in companion_files(dense).items()}
    for source in (save, save / BEFORE):
        back = tmp_path / source.name
        mcore_to_hf(source, back)
        assert {
            name: file.read_bytes() for name, file in companion_files(back).items()
        } == companions
    last, before = (load_file(tmp_path / n / "model.safetensors") for n in ("save", BEFORE))
    assert any(not last[name].equal(tensor) for name, tensor in before.items())


def test_checkpoints_of_another_model_are_not_joined(
    two_checkpoints: tuple[Job, Path, list[dict[str, Any]]], dense: Path, tmp_path: Path
) -> None:
    from mcore_qwen3vl.training.checkpoints.companions import check_companions

    config = json.loads((dense / "config.json").read_text())
    config["dtype"] = "bfloat16"
    check_companions(two_checkpoints[1], Architecture.from_hf(config))
    config["text_config"]["rms_norm_eps"] = 0.25
    with pytest.raises(BadInput, match=r"another model than --hf-model"):
        check_companions(two_checkpoints[1], Architecture.from_hf(config))


def test_a_new_optimizer_state_goes_on_at_the_saved_place_of_the_schedule(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """Steps that were left out count for the data, and not for the schedule."""
    skipping = ("--iterations-to-skip", "1", "--lr-decay-style", "linear")
    run = job(dense, data, "single", *skipping, "--save-interval", str(HALF))
    whole, save = train_and_rewind(run, tmp_path)
    rest = train(run, tmp_path / "rest", "--load", str(save), "--no-load-optim")
    rates = {entry["iteration"]: entry["learning rate"] for entry in whole}
    assert {e["iteration"]: e["learning rate"] for e in rest} == {
        step: rate for step, rate in rates.items() if step > HALF
    }
