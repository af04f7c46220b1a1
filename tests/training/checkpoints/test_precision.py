"""A run in another precision than its start: configs state it, and what is rounded is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline.to_hf import plan_mcore_to_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.checkpoints import compare_checkpoints
from mcore_qwen3vl.verification.curves import Job, train
from tests.converters.checkpoints import load


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bf16, of which some tensors are float32, as Qwen publishes them."""
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("start"), family="qwen3.5", dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def run(start: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return checkpoints and exports of a run in float32."""
    folder = tmp_path_factory.mktemp("run")
    job = Job(start, data, Layout.parse("single"), steps=1, batch=2)
    train(job, folder, "--save", str(folder / "save"), "--save-hf", str(folder / "export"))
    return folder / "save", folder / "export" / "iter_0000001"


def dtypes_of(folder: Path) -> set[str | None]:
    config = read_config_file(folder)
    sections = (config, config["text_config"], config["vision_config"])
    return {section["dtype"] for section in sections if "dtype" in section}


def test_a_run_in_float32_says_so_in_each_config(
    run: tuple[Path, Path], start: Path, tmp_path: Path
) -> None:
    save, export = run
    assert dtypes_of(start) == {"bfloat16"}
    mcore_to_hf(save, tmp_path / "later", hf_config=start)
    mcore_to_hf(save, tmp_path / "half", hf_config=start, dtype="bf16")
    for folder in (save / "hf", export, tmp_path / "later"):
        assert dtypes_of(folder) == {"float32"}
    assert dtypes_of(tmp_path / "half") == {"bfloat16"}
    stored = load(export)
    loaded = AutoModelForImageTextToText.from_pretrained(export, dtype="auto").state_dict()
    for name, tensor in stored.items():
        assert name.startswith("mtp.") or torch.equal(loaded[name], tensor), name
    before = load(start)
    trained = {n: t for n, t in stored.items() if not n.startswith("mtp.")}
    assert any(not t.bfloat16().float().equal(t) for t in trained.values())
    assert all(stored[n].dtype == before[n].dtype for n in before if n.startswith("mtp."))


def test_a_run_is_compared_with_its_export_without_what_it_does_not_train(
    run: tuple[Path, Path], start: Path, tmp_path: Path
) -> None:
    save, export = run
    for a, b in ((save, export), (export, save)):
        report = compare_checkpoints(a, b)
        assert report.ok
        assert "tensors mtp.*: the run does not train them" in report.environment["not compared"]
    hf_to_mcore(start, tmp_path / "converted")
    assert "not compared" not in compare_checkpoints(start, tmp_path / "converted").environment
    lacking = compare_checkpoints(save, tmp_path / "converted")
    assert any(found.name.startswith("mtp.") for found in lacking.findings) is False
    (note,) = [n for n in plan_mcore_to_hf(save).notes if "mtp.*" in n]
    assert note.endswith("such as the one that training began with.")
    assert "--hf-config DIR copies it" in note
    mcore_to_hf(save, tmp_path / "with", hf_config=start)
    assert load(tmp_path / "with").keys() == load(export).keys()


@pytest.mark.parametrize("converted", [False, True])
def test_what_training_in_bf16_rounds_is_named(
    converted: bool, start: Path, data: Path, tmp_path: Path
) -> None:
    job = Job(start, data, Layout.parse("single"), steps=1, batch=2, flags=("--bf16",))
    if converted:
        hf_to_mcore(start, tmp_path / "converted")
        job = replace(job, converted=tmp_path / "converted")
    train(job, tmp_path, "--save", str(tmp_path / "save"))
    wide = [name for name, tensor in load(start).items() if tensor.dtype == torch.float32]
    said = (tmp_path / "output.txt").read_text()
    begin = tmp_path / "converted" if converted else start
    assert f"{len(wide)} of " in said
    assert f"tensors of {begin} are wider than bfloat16, in which this run holds and" in said
    assert dtypes_of(tmp_path / "save" / "hf") == {"bfloat16"}
    (note,) = [n for n in plan_mcore_to_hf(tmp_path / "save").notes if "A_log" in n]
    assert note.startswith(f"{len(wide)} tensors, linear_attn.A_log and linear_attn.norm.weight,")
    assert "are bfloat16 here." in note


def test_nothing_is_rounded_where_nothing_is_wider(run: tuple[Path, Path]) -> None:
    assert not [note for note in plan_mcore_to_hf(run[0]).notes if "A_log" in note]
    architecture: Any = Architecture.from_hf(run[1])
    assert architecture.dtype == "float32"
