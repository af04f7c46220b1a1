"""The manifest holds the right checksums of the HF tensors, and its check finds any change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.checkpoints import check_manifest
from tests.command import exit_code
from tests.converters.checkpoints import copy, load, save

Tiny = Callable[[str], Path]
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


@pytest.mark.parametrize(("name", "place"), [(QUERY, (190, 3)), (EXPERTS, (7, 47, 0))])
def test_one_value_is_found(
    tiny: Tiny, mcore: Path, tmp_path: Path, name: str, place: tuple[int, ...]
) -> None:
    """It is found if one tensor differs in one bit from what the manifest was written for."""
    source = copy(tiny("moe"), tmp_path / "source")
    tensors = load(source)
    tensors[name].view(torch.int32)[place] ^= 1
    save(tensors, source)
    hf_to_mcore(source, tmp_path / "mcore")
    (tmp_path / "mcore" / "manifest.json").write_bytes((mcore / "manifest.json").read_bytes())
    problems = failed(tmp_path / "mcore")
    assert list(problems) == [name]
    assert ("in experts 7 (1)" in problems[name]) == (name == EXPERTS)


@pytest.mark.parametrize(
    ("name", "place", "where"),
    [(QUERY, (190, 3), r"states, so"), (EXPERTS, (7, 47, 0), r"states in expert 7, so")],
)
def test_an_export_of_changed_weights_is_refused(
    tiny: Tiny, mcore: Path, tmp_path: Path, name: str, place: tuple[int, ...], where: str
) -> None:
    """The manifest says nothing of experts in the other layout, and the user may delete it."""
    source, changed, out = tmp_path / "source", tmp_path / "mcore", tmp_path / "out"
    copy(tiny("moe"), source)
    tensors = load(source)
    tensors[name].view(torch.int32)[place] ^= 1
    save(tensors, source)
    hf_to_mcore(source, changed)
    (changed / "manifest.json").write_bytes((mcore / "manifest.json").read_bytes())
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
