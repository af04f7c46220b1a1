"""Checkpoints and adapters compared bit for bit, by each other and by the manifest's checksums."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.converters import export
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.checkpoints import (
    FILES,
    TENSORS,
    adapter_roundtrip,
    check_manifest,
    compare_checkpoints,
)
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verification.report import Report
from tests.command import exit_code
from tests.converters.checkpoints import copy, edit_config, load, save
from tests.turns import slow

Tiny = Callable[[str], Path]
LAYER = "model.language_model.layers.2."


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[-1] ^= 1


def flaws(report: Report, part: str) -> dict[str, str]:
    return {f.name: f.flaw for f in report.findings if f.part == part and not f.ok}


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}self_attn.v_proj.weight",
        f"{LAYER}mlp.experts.gate_up_proj",
        *slow("lm_head.weight", "model.visual.pos_embed.weight", f"{LAYER}mlp.experts.down_proj"),
    ],
)
def test_one_bit(tiny: Tiny, tmp_path: Path, name: str) -> None:
    changed = copy(tiny("moe"), tmp_path / "changed")
    tensors = load(changed)
    flip_lowest_bit(tensors[name])
    save(tensors, changed)
    hf_to_mcore(tiny("moe"), tmp_path / "mcore")
    hf_to_mcore(changed, tmp_path / "mcore-changed")
    for a in (tiny("moe"), tmp_path / "mcore"):
        for b in (changed, tmp_path / "mcore-changed"):
            result = compare_checkpoints(a, b)
            assert not result.ok
            assert {f.name: f.measured.different for f in result.failures} == {name: 1}
            assert str(result.failures[0]).startswith(f"tensors {name}: 1 values differ, by at ")


def test_zeros_of_different_sign_differ_and_equal_nans_do_not(tiny: Tiny, tmp_path: Path) -> None:
    a, b = copy(tiny("dense"), tmp_path / "a"), copy(tiny("dense"), tmp_path / "b")
    for path, zero in ((a, 0.0), (b, -0.0)):
        tensors = load(path)
        tensors["lm_head.weight"][1, 2] = zero
        tensors["model.language_model.norm.weight"][3] = torch.nan
        save(tensors, path)
    result = compare_checkpoints(a, b)
    assert [f.name for f in result.failures] == ["lm_head.weight"]


def test_dtype_absence_and_files(tiny: Tiny, tmp_path: Path) -> None:
    other = copy(tiny("dense"), tmp_path / "other")
    tensors = load(other)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    del tensors[f"{LAYER}mlp.up_proj.weight"]
    tensors["surplus"] = torch.zeros(2)
    save(tensors, other)
    edit_config(other, text_config__initializer_range=0.5)
    (other / "generation_config.json").unlink()
    (other / "NOTES").write_text("new")
    result = compare_checkpoints(tiny("dense"), other)
    assert flaws(result, TENSORS) == {
        "lm_head.weight": "dtypes float32 and bfloat16",
        f"{LAYER}mlp.up_proj.weight": "only in A",
        "surplus": "only in B",
    }
    assert flaws(result, FILES) == {
        "config.json": "differs",
        "generation_config.json": "only in A",
        "NOTES": "only in B",
    }


def test_models_of_different_size_are_not_equal(tiny: Tiny) -> None:
    result = compare_checkpoints(tiny("moe"), tiny("moe-H=I"))
    name = f"{LAYER}mlp.experts.down_proj"
    assert flaws(result, TENSORS)[name] == "the two configs give it different shapes"


def test_a_tensor_that_both_have_beside_the_model_is_not_called_equal(
    tiny: Tiny, tmp_path: Path
) -> None:
    other = copy(tiny("dense"), tmp_path / "other")
    tensors = load(other)
    tensors["surplus"] = torch.zeros(2)
    save(tensors, other)
    assert not compare_checkpoints(other, other).ok


EXPERTS = "model.language_model.layers.1.mlp.experts.gate_up_proj"
QUERY = "model.language_model.layers.1.self_attn.q_proj.weight"


def checksum(tensor: Tensor) -> str:
    return xxhash.xxh3_128(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def checksums(name: str, tensor: Tensor) -> Any:
    return [checksum(one) for one in tensor] if ".mlp.experts." in name else checksum(tensor)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = read(path)
    change(content)
    (path / "manifest.json").write_text(json.dumps(content))


def failed(path: Path) -> dict[str, str]:
    return {finding.name: finding.flaw for finding in check_manifest(path).failures}


JOINED = "model.language_model.layers.1.linear_attn.in_proj_qkv.weight"


def test_each_part_of_a_tensor_has_a_checksum(tiny: Tiny, tmp_path: Path) -> None:
    """The key's rows of `JOINED` are changed in the checkpoint, and then the parts of its entry."""
    mcore = tmp_path / "mcore"
    hf_to_mcore(tiny("hybrid"), mcore)
    entry, tensor = read(mcore)["tensors"][JOINED], load(tiny("hybrid"))[JOINED]
    assert entry["rows"] == [[0, 64], [64, 128], [128, 288]]
    assert entry["xxh3_128"] == [checksum(tensor[first:last]) for first, last in entry["rows"]]
    assert not failed(mcore)
    changed = tensor[64:128].contiguous().view(torch.uint8).numpy().tobytes()
    (file,) = (f for f in (mcore / "release").glob("*.distcp") if changed in f.read_bytes())
    content = file.read_bytes()
    file.write_bytes(content.replace(changed, bytes([changed[0] ^ 1]) + changed[1:]))
    assert failed(mcore) == {
        JOINED: "has other bytes than the manifest's checksum in rows 64 to 127"
    }
    with pytest.raises(BadInput, match=r"in_proj_qkv.weight has other .* in rows 64 to 127"):
        mcore_to_hf(mcore, tmp_path / "back")
    file.write_bytes(content)
    edit(mcore, lambda made: made["tensors"][JOINED].update(rows=[[0, 64], [64, 130], [130, 288]]))
    assert failed(mcore).keys() == {JOINED}


def test_experts_written_one_by_one_are_checked_too(tiny: Tiny, tmp_path: Path) -> None:
    """The manifest has no checksum of one matrix of an expert, but the file has one of its data."""
    source, mcore, out = tiny("hybrid-moe-v5"), tmp_path / "mcore", tmp_path / "out"
    hf_to_mcore(source, mcore)
    expert = load(source)["model.language_model.layers.1.mlp.experts.3.down_proj.weight"]
    data = expert.view(torch.uint8).numpy().tobytes()
    (file,) = (f for f in (mcore / "release").glob("*.distcp") if data in f.read_bytes())
    file.write_bytes(file.read_bytes().replace(data, bytes([data[0] ^ 1]) + data[1:]))
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\.experts.* CRC-32 is"):
        mcore_to_hf(mcore, out)
    assert not out.exists()


@pytest.fixture(scope="module")
def mcore(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an mcore checkpoint of the case ``moe``; read-only."""
    path = tmp_path_factory.mktemp("manifest") / "mcore"
    hf_to_mcore(tiny("moe"), path)
    return path


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("dense", {"make_vocab_size_divisible_by": 100, "tp": 2}),
        ("moe", {}),
        ("moe-v5", {}),
        ("mixed-listed", {"dtype": "bf16"}),
        ("bf16-sharded", {"dtype": "fp32"}),
    ],
)
def test_checksums_are_those_of_the_source(
    tiny: Tiny, tmp_path: Path, case: str, options: dict[str, Any]
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(options.get("dtype", ""))
    hf_to_mcore(tiny(case), tmp_path / "mcore", **options)
    stated = read(tmp_path / "mcore")["tensors"]
    source = load(tiny(case))
    assert set(stated) == set(source)
    for name, tensor in source.items():
        converted = tensor if dtype is None else tensor.to(dtype)
        expected = {
            "shape": list(tensor.shape),
            "dtype": str(converted.dtype).removeprefix("torch."),
            "source_dtype": str(tensor.dtype).removeprefix("torch."),
            "xxh3_128": checksums(name, converted),
        }
        if dtype is not None:
            expected["source_xxh3_128"] = checksums(name, tensor)
        assert stated[name] == expected, name
    report = check_manifest(tmp_path / "mcore")
    assert report.ok, report.failures
    assert [finding.name for finding in report.findings] == list(stated)


def test_it_says_what_was_converted(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("bf16-sharded")
    hf_to_mcore(source, tmp_path / "mcore", make_vocab_size_divisible_by=100)
    manifest = read(tmp_path / "mcore")
    assert manifest["source"]["path"] == str(source)
    weights = {f.name: f.stat().st_size for f in source.iterdir() if "safetensors" in f.name}
    assert len(weights) > 3
    assert manifest["source"]["files"] == weights
    assert manifest["expert_layout"] == "published"
    assert manifest["vocabulary"] == {"rows": 352, "padded_to": 400}
    assert manifest["versions"]["torch"] == torch.__version__
    assert (tmp_path / "mcore" / "hf" / "manifest.json").exists() is False


@pytest.mark.parametrize(
    ("name", "place", "found", "where"),
    [
        (QUERY, (190, 3), "other bytes", r"states, so"),
        (EXPERTS, (7, 47, 0), "in experts 7 (1)", r"states in expert 7, so"),
    ],
)
def test_one_value_that_has_changed_is_found_and_an_export_refused(
    tiny: Tiny,
    mcore: Path,
    tmp_path: Path,
    name: str,
    place: tuple[int, ...],
    found: str,
    where: str,
) -> None:
    """One tensor differs in one bit from what the manifest was written for.

    The manifest says nothing of experts in the other layout, and the user may delete it.
    """
    source, changed, out = tmp_path / "source", tmp_path / "mcore", tmp_path / "out"
    copy(tiny("moe"), source)
    tensors = load(source)
    tensors[name].view(torch.int32)[place] ^= 1
    save(tensors, source)
    hf_to_mcore(source, changed)
    (changed / "manifest.json").write_bytes((mcore / "manifest.json").read_bytes())
    problems = failed(changed)
    assert list(problems) == [name]
    assert found in problems[name]
    assert ("in experts 7 (1)" in problems[name]) == (name == EXPERTS)
    refused: list[dict[str, Any]] = [{}, {"dtype": "bf16"}]
    refused += [{"expert_layout": "v5"}] * (name == QUERY)
    for options in refused:
        with pytest.raises(BadInput, match=f"{re.escape(name)} has other bytes .* {where}"):
            mcore_to_hf(changed, out, **options)
        assert not out.exists()
    if name == EXPERTS:
        mcore_to_hf(changed, tmp_path / "v5", expert_layout="v5")
    (changed / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be used as a manifest"):
        mcore_to_hf(changed, out)
    (changed / "manifest.json").unlink()
    mcore_to_hf(changed, out)
    assert torch.equal(load(out)[name], tensors[name])


def test_tensors_that_do_not_fit_are_named(mcore: Path, tmp_path: Path) -> None:
    path = copy(mcore, tmp_path / "mcore")
    names = list(read(path)["tensors"])[:3]

    def change(manifest: dict[str, Any]) -> None:
        tensors = manifest["tensors"]
        tensors["ghost"] = tensors.pop(names[0])
        tensors[names[1]]["shape"][0] += 1
        tensors[names[2]]["dtype"] = "bfloat16"
        tensors[EXPERTS]["xxh3_128"] = tensors[EXPERTS]["xxh3_128"][0]

    edit(path, change)
    problems = failed(path)
    assert set(problems) == {*names, "ghost", EXPERTS}
    assert problems[names[0]] == "is not in the manifest"
    assert problems[names[1]] == "has shape [32]; the manifest says [33]"
    assert "has dtype float32; the manifest says bfloat16" in problems[names[2]]
    assert problems["ghost"] == "is in the manifest, but not in the checkpoint"
    assert "another form" in problems[EXPERTS]


def test_later_iterations_are_not_what_the_manifest_is_about(mcore: Path, tmp_path: Path) -> None:
    path = copy(mcore, tmp_path / "mcore")
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    assert check_manifest(path).ok
    assert check_manifest(path / "release").ok


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format=2),
        lambda m: m.pop("format"),
        lambda m: m.pop("tensors"),
        lambda m: m.update(tensors={}),
        lambda m: m.update(tensors=[1]),
        lambda m: m.update(iteration="../elsewhere"),
        lambda m: m.update(iteration=".."),
        lambda m: m.update(expert_layout="sideways"),
        lambda m: m["tensors"][EXPERTS]["xxh3_128"].pop(),
        lambda m: m["tensors"][EXPERTS].pop("xxh3_128"),
        lambda m: m["tensors"][QUERY].update(xxh3_128=5),
        lambda m: m["tensors"][QUERY].update(shape="ab"),
        *(
            lambda m, rows=rows: m["tensors"][QUERY].update(rows=rows, xxh3_128=["0"] * 3)
            for rows in ([[1], [2], [3]], [1, 2, 3], [["a", "b"]] * 3, "abc")
        ),
    ],
)
def test_an_unusable_manifest_is_refused(
    mcore: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = tmp_path / "mcore"
    folder.mkdir()
    (folder / "release").symlink_to(mcore / "release")
    (folder / "manifest.json").write_bytes((mcore / "manifest.json").read_bytes())
    edit(folder, change)
    with pytest.raises(BadInput, match=r"manifest.json (cannot be used|has format 2)"):
        check_manifest(folder)


def test_exit_codes(mcore: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy(mcore, tmp_path / "mcore")

    def code(*arguments: object) -> object:
        return exit_code("verify", "manifest", *arguments)

    assert code(path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert result["parts"][0]["compared"] == 134
    edit(path, lambda m: m["tensors"][QUERY].update(xxh3_128="0" * 32))
    assert code(path) == 1
    assert QUERY in capsys.readouterr().out
    (path / "manifest.json").write_text("{")
    assert code(path) == 2
    (path / "manifest.json").unlink()
    assert code(path) == 2
    assert "has no manifest.json" in capsys.readouterr().err


def test_progress_adds_up(mcore: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    check_manifest(mcore, workers=3, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]
    assert {call[2] for call in calls} == set(read(mcore)["tensors"])


@pytest.mark.parametrize(
    ("model", "lora", "layout"),
    [
        ("dense", "everything", None),
        pytest.param("moe", "whole router", Layout(tp=2, ep=2, sp=True), marks=pytest.mark.slow),
    ],
)
def test_every_tensor_comes_back(
    model: str, lora: str, layout: Layout | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(model)
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], base)
    report = adapter_roundtrip(base, adapter, layout=layout)
    report.require()
    assert len(report.findings) > 8


def test_experts_in_another_order_would_be_seen(
    moe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The report fails if the export orders B's columns expert by expert, as other tools do."""
    parts = export.factor_parts

    def contiguous(models: Any) -> Any:
        for part in parts(models):
            rows, columns = part.box
            if part.name.endswith("lora_B"):
                first = columns.start * part.local.shape[1]
                columns = slice(first, first + part.local.shape[1])
            yield replace(part, box=(rows, columns))

    monkeypatch.setattr(export, "factor_parts", contiguous)
    config = ADAPTERS["gate and up of experts"]
    adapter = write_random_adapter(tmp_path / "adapter", config, moe)
    report = adapter_roundtrip(moe, adapter, layout=Layout())
    assert {f.name.rpartition(".")[2] for f in report.failures} == {"lora_B"}
    assert len(report.failures) == 4
