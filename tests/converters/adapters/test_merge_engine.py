"""Merging ends in the same bytes if it is killed, fails or is repeated, as conversions do."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.merge import Merged, merge, plan_merge
from mcore_qwen3vl.converters.adapters.vllm import vllm_notes
from mcore_qwen3vl.converters.convert import hf_to_hf, write_part
from mcore_qwen3vl.converters.offline import to_hf
from mcore_qwen3vl.part import Part
from tests.command import exit_code
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import Kind, edit_config, make
from tests.converters.adapters.rounding import assert_merged
from tests.converters.checkpoints import load, tree_digests, turned
from tests.converters.offline.test_engine import Failing, dying_at, in_child
from tests.converters.storage.test_part_staging import die_in_the_middle
from tests.test_files import full_disk

Get = Callable[[str], Made]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_hf, "unit_bytes", lambda total: 100_000)


@pytest.mark.slow
def test_killed_it_continues(made: Get, tmp_path: Path) -> None:
    source = made("rank patterns")
    whole = tmp_path / "whole"
    merge(source.base, source.folder, whole, workers=1)
    expected = tree_digests(whole)
    for number, point in enumerate((20, 70, 110)):
        target = tmp_path / f"killed-{number}"
        options = {"workers": 2, "progress": dying_at(point)}
        run = functools.partial(merge, source.base, source.folder, target, **options)
        assert in_child(run) == -signal.SIGKILL
        assert not target.exists()
        resumed = merge(source.base, source.folder, target).resumed_units
        assert resumed > 0 or point == 20
        assert tree_digests(target) == expected


def test_another_adapter_is_not_continued(made: Get, tmp_path: Path) -> None:
    first, second, target = made("only gate_up"), made("only down"), tmp_path / "target"
    run = functools.partial(merge, first.base, first.folder, target, progress=dying_at(100))
    assert in_child(run) == -signal.SIGKILL
    assert merge(second.base, second.folder, target).resumed_units == 0


def test_a_full_disk_is_one_error(
    made: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = made("rank patterns"), tmp_path / "target"
    failing = Failing(os.pwrite, 12, errno.ENOSPC)
    monkeypatch.setattr(os, "pwrite", failing)
    arguments = ("lora", "merge", source.base, source.folder, target, "--workers", 1, "--json")
    assert exit_code(*arguments) == 2
    message = json.loads(capsys.readouterr().out)["error"]
    assert "No space left on device" in message
    assert "running the same command again continues from there" in message
    assert not target.exists()
    failing.mend()
    assert exit_code(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["resumed_units"] > 0
    merge(source.base, source.folder, tmp_path / "whole")
    assert tree_digests(target) == tree_digests(tmp_path / "whole")


def test_a_full_disk_leaves_no_adapter(
    made: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = made("swapped roles"), tmp_path / "out"
    with full_disk(5000):
        code = exit_code("lora", "convert", source.folder, out, "--hf-config", source.base)
    assert code == 2
    said = capsys.readouterr().err
    assert f"{out} cannot be written: " in said
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []


def test_layouts_roles_and_dtypes(made: Get, tmp_path: Path) -> None:
    """Any layout, roles and dtype of base, adapter and result give the same model."""
    source = made("swapped roles")
    hf_to_hf(source.base, tmp_path / "base-v5", expert_layout="v5")
    canonical = tmp_path / "canonical"
    config = ("--hf-config", source.base)
    assert exit_code("lora", "convert", source.folder, canonical, *config) == 0
    assert read_adapter(canonical, source.base).roles == "canonical"
    merge(source.base, source.folder, tmp_path / "merged")
    merge(source.base, canonical, tmp_path / "half", dtype="bf16")
    merge(tmp_path / "base-v5", canonical, tmp_path / "back")
    merge(tmp_path / "base-v5", canonical, tmp_path / "v5", expert_layout="v5")
    found = {name: load(tmp_path / name) for name in ("merged", "half", "back", "v5")}
    adapter, base = read_adapter(source.folder, source.base), turned(load(source.base))
    for name, tensors in found.items():
        assert_merged(tensors if name == "v5" else turned(tensors), base, adapter)
    dtypes = {name: {t.dtype for t in tensors.values()} for name, tensors in found.items()}
    assert dtypes.pop("half") == {torch.bfloat16}
    assert set.union(*dtypes.values()) == {torch.float32}


def test_bad_input_leaves_nothing(
    made: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dense, moe = made("vision"), made("rank patterns")
    for arguments, message in (
        (("merge", dense.base, moe.folder, "out"), "lacks|holds"),
        (("merge", moe.folder, moe.base, "out"), "is an adapter"),
        (("merge", moe.base, moe.base, "out"), "adapter_config.json does not exist"),
        (("convert", moe.base, "out"), "adapter_config.json does not exist"),
        (("convert", moe.folder, "out", "--from-roles", "swapped"), "are not the swapped roles"),
    ):
        assert exit_code("lora", *arguments) == 2
        text = " ".join(capsys.readouterr().err.split())
        assert any(part in text for part in message.split("|")), text
        assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_where_tensors_come_from(made: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merged, "stream", pytest.fail)
    source = made("lm_head of tied")
    plan = plan_merge(source.base, source.folder)
    origins = {tensor.target: tensor.sources[0] for tensor in plan.planned}
    assert origins["lm_head.weight"] == "adapter + B·A"
    assert "two tensors, with tie_word_embeddings false" in " ".join(plan.notes)


def test_a_base_other_than_the_adapters_is_noted(made: Get, tmp_path: Path) -> None:
    source = made("vision")
    adapter = shutil.copytree(source.folder, tmp_path / "adapter")

    def notes(named: Path) -> str:
        edit_config(adapter, base_model_name_or_path=str(named))
        return " ".join(plan_merge(source.base, adapter).notes)

    assert f"trained on {tmp_path}, and is used with {source.base}" in notes(tmp_path)
    assert "trained on" not in notes(source.base)
    assert "trained on" not in notes(tmp_path / "no longer there")


def test_what_vllm_would_refuse_is_said(
    made: Get, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    def notes(kind: str) -> str:
        found = read_adapter(made(kind).folder, made(kind).base)
        return " ".join(vllm_notes(found, Architecture.from_hf(made(kind).base)))

    assert notes("rank patterns") == ""
    assert "adapts only gate_up_proj" in notes("only gate_up")
    assert "only in the canonical roles" in notes("swapped roles")
    assert "modules_to_save: merge the adapter" in notes("tied")
    assert "enable_tower_connector_lora is set" in notes("vision")
    assert "attn.qkv" not in notes("vision")
    assert "attn.qkv in the vision tower of a MoE model" in notes("all-linear")
    for rank, said in ((16, ""), (17, "needs max_lora_rank 32"), (600, "refuses the adapter")):
        folder = tmp_path / str(rank)
        make(Kind("", {"r": rank, "target_modules": ["q_proj"]}), tiny("dense"), folder)
        adapter = read_adapter(folder, tiny("dense"))
        found = vllm_notes(adapter, Architecture.from_hf(tiny("dense")))
        assert [said in note for note in found] == ([True] if said else [])


def test_strict_writes_nothing(
    made: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, base = made("vision"), tmp_path / "base"
    shutil.copytree(source.base, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.visual.merger.norm.weight"][0] = torch.inf
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    target = tmp_path / "merged"
    assert exit_code("lora", "merge", base, source.folder, target, "--strict") == 1
    assert "1 tensor has NaN or infinite values" in capsys.readouterr().err
    assert not target.exists()


def test_parts_make_the_bytes_of_one_process(
    made: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part is killed and another is missing; parts of another adapter do not belong to them."""
    source, other = made("only gate_up"), made("only down")
    whole, target = tmp_path / "whole", tmp_path / "parts"
    size = ("--max-shard-size", "50KB")
    assert exit_code("lora", "merge", source.base, source.folder, whole, *size) == 0

    def part(index: int, adapter: Made) -> tuple[int, str]:
        capsys.readouterr()
        words = ("lora", "merge", adapter.base, adapter.folder, target, *size)
        code = exit_code(*words, "--part", f"{index}/3", "--json")
        return code, capsys.readouterr().out

    plan = functools.partial(plan_merge, source.base, source.folder, max_shard_size=size[1])
    killed = functools.partial(
        write_part, plan, target, Part(1, 3), workers=1, progress=die_in_the_middle
    )
    assert in_child(killed) == -signal.SIGKILL
    code, said = part(0, source)
    assert (code, json.loads(said)["missing"]) == (0, ["1/3", "2/3"])
    code, said = part(2, other)
    assert code == 2
    assert "differs in size and time of the source's adapter_config.json" in said
    code, said = part(2, source)
    assert (code, json.loads(said)["missing"]) == (0, ["1/3"])
    assert not target.exists()
    code, said = part(1, source)
    done = json.loads(said)
    assert (code, done["missing"]) == (0, [])
    assert 0 < done["resumed_units"] < done["units"]
    assert tree_digests(target) == tree_digests(whole)
