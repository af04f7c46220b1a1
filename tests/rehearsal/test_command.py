"""A rehearsal is read from a launch script or flags, and some ranks stand for all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.command import (
    Command,
    prepare_command,
    read_command,
    roles_of,
    write_made_up_sidecar,
)
from mcore_qwen3vl.rehearsal.rehearse import Rehearsal, RehearsedGpu, checked_architecture
from mcore_qwen3vl.rehearsal.report import heading
from mcore_qwen3vl.runtime.gpus import allowance_gib, find_gpu
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from tests.data.test_sidecar import NumberFile

LAUNCH = Path(__file__).parents[2] / "launch"
BIG = Architecture.from_hf(PUBLISHED / "235b_a22b.json")
SMALL = Architecture.from_hf(PUBLISHED / "8b.json")
MODEL = ("--hf-model", str(PUBLISHED / "8b.json"))


def test_a_script_gives_flags_ranks_and_the_model_of_its_name() -> None:
    command = read_command([str(LAUNCH / "sft_30b_a3b.sh"), "--lr", "3e-6"], None)
    assert command.gpus == 16
    assert str(command.layout) == "tp2xep8xdp8+sp"
    assert command.value("--lr") == "3e-6"  # the last value wins
    assert command.value("--hf-model") == str(PUBLISHED / "30b_a3b.json")
    fused = command.value("--moe-permute-fusion") is not None
    noted = any("Transformer Engine is not installed here" in note for note in command.notes)
    there = find_spec("transformer_engine") is not None
    assert (command.value("--spec"), fused, noted) == (
        ("te", True, False) if there else ("torch", False, True)
    )
    assert not any("fewer kernels" in note for note in command.notes)  # said without experts only
    assert command.micro_batches == 64 // 8


@pytest.mark.parametrize("name", ["sft_8b", "sft_qwen3.5_9b"])
def test_a_script_is_named_as_launch_list_has_it(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("exit 1")  # a file here is not what the list names
    by_name, with_suffix, by_path = (
        read_command([word], None) for word in (name, f"{name}.sh", str(LAUNCH / f"{name}.sh"))
    )
    assert by_name.flags == with_suffix.flags == by_path.flags
    assert by_name.model == name.removeprefix("sft_")


def test_gpus_change_the_data_parallel_size_and_a_model_can_be_named() -> None:
    words = [str(LAUNCH / "sft_8b.sh"), "--hf-model", str(PUBLISHED / "4b.json")]
    command = read_command(words, 16)
    assert command.layout.dp == 8
    assert command.value("--hf-model") == str(PUBLISHED / "4b.json")


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        (["--hf-model", "x"], None, "Say how many GPUs"),
        (["--lr", "1"], 8, "No model is named: give --hf-model"),
        (["launch/none.sh"], None, "There is no script launch/none.sh"),
        (["grpo_8b"], None, "grpo_8b.yaml is a configuration"),  # a configuration for VERL
        ([str(LAUNCH / "common.sh")], None, "does not print a torchrun command"),
        ([str(LAUNCH / "sft_2b.sh")], 0, "--gpus is 0"),
        (
            ["--hf-model", "x", "--tensor-model-parallel-size", "two"],
            8,
            "--tensor-model-parallel-size: invalid int value: 'two'",
        ),
        (["--hf-model", "x", "--train-itres", "3"], 8, "Did you mean --train-iters"),
        ([str(LAUNCH / "sft_2b.sh"), "--train-itres", "3"], None, "Did you mean --train-iters"),
    ],
)
def test_what_cannot_be_read(
    words: list[str], gpus: int | None, message: str, listed: None
) -> None:
    with pytest.raises(BadInput, match=message):
        read_command(words, gpus)


@pytest.mark.parametrize(
    ("flags", "stub"),
    [(("--bf16",), True), (("--bf16", "--deterministic-mode"), False), (("--fp32",), False)],
)
def test_it_is_said_what_stands_for_the_kernels_of_gated_delta_nets(
    flags: tuple[str, ...], stub: bool, tmp_path: Path
) -> None:
    model = ("--hf-model", str(PUBLISHED / "qwen3.5_0.8b.json"))
    prepared = prepare_command(
        read_command([*model, "--packing", "--spec", "torch", *flags], 1), tmp_path
    )
    [note] = [note for note in prepared.notes if "gated delta nets" in note]
    assert ("with a stub of flash-linear-attention" in note) is stub
    assert ("in plain torch" in note) is not stub
    assert ("--deterministic-mode takes" in note) is stub


def test_flags_are_taken_out_with_their_values() -> None:
    command = Command(("--a", "1", "2", "--b", "--c=3", "--d", "x"), 1)
    assert command.without("--a", "--c").flags == ("--b", "--d", "x")
    assert command.value("--c") == "3"
    assert command.value("--b") == ""
    assert command.plus("--d", "y").value("--d") == "y"


def test_roles_are_the_stages_that_differ() -> None:
    script = read_command([str(LAUNCH / "sft_235b_a22b.sh")], None)
    roles = roles_of(script, BIG)
    assert [(r.name, r.rank, r.stages) for r in roles] == [
        ("first stage, 2 virtual", 0, 1),
        ("middle stages (as 1), 2 virtual", 16, 4),
        ("middle stages (as 5), 2 virtual", 80, 2),
        ("last stage, 2 virtual", 112, 1),
    ]
    assert [r.stage for r in roles_of(script, BIG, ("first", "last"))] == [0, 7]
    with pytest.raises(BadInput, match="end is not one of all, first"):
        roles_of(script, BIG, ("end",))


def test_one_stage_two_stages_virtual_stages_and_another_order_of_ranks() -> None:
    flags = (*MODEL, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size")
    (only,) = roles_of(Command(MODEL, 8), SMALL)
    assert (only.rank, only.stages) == (0, 1)
    two = roles_of(Command((*flags, "2", "--num-virtual-stages-per-pipeline-rank", "3"), 8), SMALL)
    assert [(r.name, r.rank) for r in two] == [
        ("first stage, 3 virtual", 0),
        ("last stage, 3 virtual", 4),
    ]
    mapped = roles_of(Command((*flags, "2", "--use-tp-pp-dp-mapping"), 8), SMALL)
    assert [r.rank for r in mapped] == [0, 2]
    split = (*flags, "4", "--pipeline-model-parallel-layout")
    alike = roles_of(Command((*split, "E|t*12|t*12|t*12L"), 8), SMALL)
    assert [(r.stage, r.stages) for r in alike] == [(0, 1), (1, 2), (3, 1)]
    # Ranks have equally many layers, but not in the same virtual stages.
    uneven = Command((*split, "E|tt|ttt|t|t*12|t*9|t*8|tL"), 8)
    assert [r.stage for r in roles_of(uneven, SMALL)] == [0, 1, 2, 3]
    assert {r.name.partition(", ")[2] for r in roles_of(uneven, SMALL)} == {"2 virtual"}


def test_as_many_micro_batches_as_fill_the_pipeline() -> None:
    batch = (*MODEL, "--global-batch-size", "64", "--pipeline-model-parallel-size", "4")
    assert Command(batch, 8).rehearsed_micro_batches == 5  # of 32
    virtual = (*batch, "--num-virtual-stages-per-pipeline-rank", "2")
    assert Command(virtual, 8).rehearsed_micro_batches == 8
    turns = (*virtual, "--microbatch-group-size-per-virtual-pipeline-stage", "6")
    assert Command(turns, 8).rehearsed_micro_batches == 12
    assert Command((*MODEL, "--global-batch-size", "8"), 8).rehearsed_micro_batches == 1


@pytest.mark.parametrize(
    ("shape", "written"),
    [
        *(("8b", written) for written in ("single", "pp4xvpp2+first1+last3", "pp2+E|ttt|t|L")),
        *(("30b_a3b", written) for written in ("tp2xep8xetp2xcp2xdp8+sp", "tp2xdp2", "tp2xetp2")),
    ],
)
def test_a_layout_is_read_from_its_flags(shape: str, written: str) -> None:
    layout, moe = Layout.parse(written), shape == "30b_a3b"
    flags = ("--hf-model", str(PUBLISHED / f"{shape}.json"), *layout.flags(moe=moe))
    assert Command(flags, layout.world_size).layout == layout


def test_experts_are_divided_over_tp_unless_a_flag_says_otherwise() -> None:
    flags = (
        "--tensor-model-parallel-size",
        "2",
        "--hf-model",
        str(PUBLISHED / "30b_a3b.json"),
    )
    assert Command(flags, 2).layout.etp == 2
    assert Command((*flags, "--expert-tensor-parallel-size", "1"), 2).layout.etp == 1


def test_virtual_stages_want_a_number_of_micro_batches_that_goes_round() -> None:
    flags = (
        *("--hf-model", str(PUBLISHED / "4b.json"), "--pipeline-model-parallel-size", "4"),
        *("--num-virtual-stages-per-pipeline-rank", "3", "--global-batch-size", "10"),
    )
    with pytest.raises(BadInput, match=r"every 4 micro-batches\. There are 10"):
        checked_architecture(Command(flags, 4))
    turns = (*flags, "--microbatch-group-size-per-virtual-pipeline-stage")
    checked_architecture(Command((*turns, "5"), 4))
    with pytest.raises(BadInput, match="fewer than PP 4"):
        checked_architecture(Command((*turns, "3"), 4))


def test_a_file_that_cannot_be_made_up_is_named(dense: Path, tmp_path: Path) -> None:
    """Somebody else's loss may read one; without it the encoder's own error would come."""
    data = write_half_images(tmp_path / "data", 3, tokens=200, image_side=4, token_pixels=8)
    flags = ["--hf-model", str(dense), "--loss", "cross_entropy", "--seq-length", "512"]
    said = "--loss cross_entropy reads a file beside the data, and its class NumberFile makes none"
    with pytest.raises(BadInput, match=f"{said} up .*: give --data-path, with such a file beside"):
        write_made_up_sidecar(NumberFile(), data, dense, CommandLine(flags).settings)


def test_the_heading_is_in_one_unit() -> None:
    device = RehearsedGpu(find_gpu("h100-80gb"), 80.0, 2.0)
    found = heading(Rehearsal(Command(MODEL, 1), device))
    assert "85.9 GB, of which 2.1 GB are taken" in found
    assert "83.8 GB are left" in found


def test_gpus_and_their_allowance() -> None:
    assert find_gpu("h200").name == "h200-141gb"
    with pytest.raises(BadInput, match="a100 is more than one GPU"):
        find_gpu("a100")
    with pytest.raises(BadInput, match="v100 is not known"):
        find_gpu("v100")
    # Measured on one H100: 3.2 GiB beside the allocator, and 3.9 with experts.
    assert allowance_gib(Layout(), moe=False) == pytest.approx(3.2, abs=0.1)
    assert allowance_gib(Layout(), moe=True) == pytest.approx(3.9, abs=0.1)
    divided = allowance_gib(Layout(tp=2, dp=4), moe=False)
    assert divided == pytest.approx(0.75 + 7 * 0.4)
    assert allowance_gib(Layout(ep=8, dp=8), moe=True) > divided + 3
