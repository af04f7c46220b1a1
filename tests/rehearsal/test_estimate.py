"""``rehearse --estimate`` prints the modelled memory of every pipeline stage, by a formula."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.search import FULL_RECOMPUTE, memory_of_stages
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in
from mcore_qwen3vl.training import memory
from tests.command import exit_code
from tests.rehearsal.conftest import Command as RunCommand

SIZES = (
    *("--tensor-model-parallel-size", "4", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "8"),
    *("--expert-tensor-parallel-size", "1"),
)
UNEVEN = (
    *("--pipeline-model-parallel-size", "2"),
    *("--decoder-first-pipeline-num-layers", "11", "--decoder-last-pipeline-num-layers", "17"),
)
LAST_IS_FULLEST = ("--decoder-first-pipeline-num-layers", "2")


def run(name: str, gpus: int, *words: str, options: tuple[str, ...] = ()) -> int:
    command = ["rehearse", "--estimate", "--gpus", str(gpus), *options]
    return exit_code(*command, "--hf-model", PUBLISHED / f"{name}.json", *words)


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ((), "cheap"),
        (("--keep-activations",), "none"),
        (("--recompute-granularity", "full", "--recompute-method", "uniform"), "full"),
        (
            (
                *("--recompute-granularity", "full", "--recompute-method", "block"),
                *("--recompute-num-layers", "3"),
            ),
            3,
        ),
    ],
)
def test_every_stage_has_the_estimate_of_its_flags(
    flags: tuple[str, ...], recompute: memory.Recompute, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SIZES, "--seq-length", "4096", *flags)
    assert run("30b_a3b", 64, *words, options=("--json",)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "modelled, not measured"
    assert (found["gpus"], found["layout"]) == (64, "tp4xpp4xep8xdp4+sp")
    a, layout = (
        Architecture.from_hf(PUBLISHED / "30b_a3b.json"),
        Layout.parse(found["layout"]),
    )
    expected = memory.estimate_stages(a, layout, 4096, recompute)
    assert [stage["total"] for stage in found["stages"]] == [m.total for m in expected]
    assert [stage["layers"] for stage in found["stages"]] == [12] * 4


def test_a_lora_run_has_states_for_its_factors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = []
    for flags in ((), ("--lora-rank", "16")):
        assert run("8b", 8, *flags, options=("--json",)) == 0
        optimizer.append(json.loads(capsys.readouterr().out)["stages"][0]["optimizer"])
    assert 0 < optimizer[1] < optimizer[0] / 50


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_has_the_size_that_is_said(
    lora: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors, that is: those of a tiny model are small beside what describes them."""
    model, data = write_tiny_checkpoint(tmp_path / "model", moe=True), tmp_path / "data"
    words = [
        "--hf-model", model, "--load-hf", model, "--data-path", write_image_qa(data, 8), "--bf16",
        "--use-distributed-optimizer", "--expert-model-parallel-size", "2", "--seq-length", "256",
        "--train-iters", "1", "--global-batch-size", "2", "--micro-batch-size", "1", "--lr", "1e-3",
        *(("--lora-rank", "4", "--lora-target", "all-linear") if lora else ()),
    ]  # fmt: skip
    estimate = ("rehearse", "--estimate", "--gpus", "2", "--json", "--disk-gb-per-s", "2")
    assert exit_code(*estimate, *words) == 0
    said = json.loads(capsys.readouterr().out)["checkpoint"]
    save = tmp_path / "save"
    assert exit_code("train", "--processes", "2", "--cpu", *words, "--save", save) == 0
    metadata = FileSystemReader(save / "iter_0000001").read_metadata().state_dict_metadata
    tensors = [one for one in metadata.values() if isinstance(one, TensorStorageMetadata)]
    held = sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)
    assert said["saved"] == pytest.approx(held, rel=0.01)
    assert said["saved_seconds"] == said["saved"] / 2e9


def test_a_start_reads_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Two data-parallel ranks read the weights twice, and each a half of the optimizer's state."""
    loaded = []
    for gpus in (1, 2):
        assert run("2b", gpus, options=("--json",)) == 0
        checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
        loaded.append(checkpoint["loaded"])
    assert loaded[0] == checkpoint["saved"]
    assert loaded[1] - loaded[0] == pytest.approx(checkpoint["saved"] * 2 / 14)


def test_it_is_a_table_and_what_does_not_divide_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("2b", 2, *UNEVEN, options=("--disk-gb-per-s", "2")) == 0
    table = capsys.readouterr().out
    assert re.search(r"write \d+\.\d GB \(\d+ s\) for a checkpoint, and read", table)
    assert "modelled, not measured" in table
    rows = [line.split()[:2] for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [["0", "11"], ["1", "17"]]
    assert run("2b", 3, "--tensor-model-parallel-size", "3") == 2
    assert "16 attention heads cannot be divided over TP 3" in capsys.readouterr().err
    assert run("2b", 8, options=("--fit",)) == 2
    assert run("2b", 8, options=("--tokens", "1e9")) == 2
    assert "--estimate rehearses nothing: drop it" in capsys.readouterr().err
    assert exit_code("rehearse", "--disk-gb-per-s", "2", "sft_8b") == 2
    assert "--disk-gb-per-s is for --estimate" in capsys.readouterr().err


@pytest.mark.slow  # two rehearsals each
@pytest.mark.parametrize(
    ("name", "layout", "more", "sent"),
    [
        ("qwen3.5_9b", "single", (), 0),
        ("qwen3.5_9b", "tp2+sp", (), 0),
        # Where the first stage is fullest, the gradient of what it sent has come and is copied.
        ("qwen3.5_9b", "pp2", LAST_IS_FULLEST, 3),
        # The last stage of a tied model has a copy of the embedding.
        ("qwen3.5_0.8b", "pp2", LAST_IS_FULLEST, 1),
        ("qwen3.5_9b", "tp2+sp", FULL_RECOMPUTE, 0),
        ("qwen3.5_35b_a3b", "ep8xdp8", (), 0),
    ],
)
def test_what_mtp_takes(
    name: str, layout: str, more: tuple[str, ...], sent: int, command: RunCommand, tmp_path: Path
) -> None:
    """The peak of every role grows as the estimate does, with eight layers of the real width.

    What a stage sends, where the next tokens' embeddings travel too, is in no estimate: the first
    stage has room for `sent` times these embeddings more.
    """
    write_stand_in(PUBLISHED / f"{name}.json", tmp_path / "model", layers=8, vision_blocks=1)
    config = tmp_path / "model" / "config.json"
    fields = json.loads(config.read_text())
    # With so few layers, gradients of the whole embedding would be most of the peak.
    fields["text_config"]["vocab_size"] = 65536
    config.write_text(json.dumps(fields))
    sizes = Layout.parse(layout)
    flags = (
        *("--hf-model", str(tmp_path / "model"), "--packing", "--seq-length", "8192", "--bf16"),
        *("--use-distributed-optimizer", "--lr", "1e-5", "--global-batch-size", "16"),
        *("--spec", "torch", *sizes.flags(moe=sizes.ep > 1), *more),
        *(("--moe-grouped-gemm",) if sizes.ep > 1 else ()),
    )
    peaks, estimates = [], []
    for mtp in ((), ("--mtp-num-layers", "1")):
        run = Command((*flags, *mtp), sizes.world_size)
        stages = memory_of_stages(run, run.line.architecture, None)
        # On a GPU that is nearly full, the loss keeps one chunk of logits, as the estimate has it.
        fullest = max(stage.total for stage in stages)
        memory_flags = ("--memory-gib", str(1.18 * fullest / 2**30), "--allowance-gib", "0")
        code, found = command("--gpus", run.gpus, *memory_flags, "--no-suggest", *run.flags)
        assert code == 0, found
        peaks.append([role["peak"] / 1e9 for role in found["roles"]])
        estimates.append([stage.total / 1e9 for stage in stages])
    hidden = 2 * run.line.architecture.hidden_size * 8192 / 1e9  # GB, of all tokens
    left_out = [sent * hidden] * (sizes.pp - 1) + [0.0]
    for before, after, estimate, grown, more_held in zip(*peaks, *estimates, left_out, strict=True):
        assert after - before == pytest.approx(grown - estimate + more_held, rel=0.05, abs=0.02)
