"""Hugging Face -> mcore -> Hugging Face gives back every bit, and a target is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import (
    hf_to_hf,
    hf_to_mcore,
    mcore_to_hf,
    plan_hf_to_mcore,
    plan_mcore_to_hf,
)
from mcore_qwen3vl.converters.describe import estimate, slice_bytes
from mcore_qwen3vl.converters.hf.config_file import dtype_to_state
from mcore_qwen3vl.converters.hf.shards import TensorSpec
from mcore_qwen3vl.converters.mapping.table import max_rows, table
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.checkpoints import compare_checkpoints
from tests.command import exit_code
from tests.converters.checkpoints import (
    CASES,
    assert_same_files,
    assert_same_tensors,
    copy,
    cut,
    load,
    save,
    tree_digests,
)
from tests.turns import slow_except

Tiny = Callable[[str], Path]


FAST = ("dense-tied", "moe-H=I-v5", "mixed-step-v5", "bf16-sharded")


@pytest.mark.parametrize("case", slow_except(list(CASES), *FAST))
def test_round_trip_is_bitwise(tiny: Tiny, tmp_path: Path, case: str) -> None:
    source, mcore, back = tiny(case), tmp_path / "mcore", tmp_path / "back"
    hf_to_mcore(source, mcore)
    mcore_to_hf(mcore, back)
    assert_same_tensors(source, back)
    assert_same_files(source, back)
    for pair in ((source, mcore), (mcore, source), (source, back), (mcore, mcore)):
        result = compare_checkpoints(*pair)
        result.require()
        compared = sum(finding.measured.count for finding in result.findings)
        assert compared == sum(t.numel() for t in load(source).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mcore"]


@pytest.mark.parametrize("case", ["dense", "moe", "moe-v5"])
def test_vocabulary_padding_round_trips(tiny: Tiny, tmp_path: Path, case: str) -> None:
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    hf_to_mcore(tiny(case), mcore, make_vocab_size_divisible_by=100, tp=2)
    mcore_to_hf(mcore, back)
    assert_same_tensors(tiny(case), back)


def test_companion_files_of_any_kind_travel(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy(tiny("dense"), source)
    (source / "LICENSE").write_text("do as you like")
    (source / "figures").mkdir()
    (source / "figures" / "logo.png").write_bytes(bytes(range(256)))
    (source / "linked.json").symlink_to(source / "LICENSE")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("not part of the checkpoint")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    hf_to_mcore(source, tmp_path / "mcore")
    result = mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    back = tmp_path / "back"
    assert (back / "LICENSE").read_text() == "do as you like"
    assert (back / "figures" / "logo.png").read_bytes() == bytes(range(256))
    assert (back / "linked.json").read_text() == "do as you like"
    assert not (back / "linked.json").is_symlink()
    assert not (back / ".git").exists()
    assert not (back / "pytorch_model.bin").exists()
    assert {"LICENSE", "figures/logo.png", "config.json"} <= set(result.companion_files)


def test_shards_and_index_of_an_export(tiny: Tiny, tmp_path: Path) -> None:
    hf_to_mcore(tiny("moe"), tmp_path / "mcore")
    summary = mcore_to_hf(tmp_path / "mcore", tmp_path / "back", max_shard_size="300KB")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    tensors = load(tiny("moe"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == summary.files > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        held = load_file(tmp_path / "back" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(held)
        assert sum(t.nbytes for t in held.values()) <= 300_000 or len(held) == 1
    assert_same_tensors(tiny("moe"), tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_dtype_is_converted_with_its_declaration(
    tiny: Tiny, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    source = tiny("moe")
    hf_to_mcore(source, tmp_path / "mcore", dtype=name)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "early")
    hf_to_mcore(source, tmp_path / "kept")
    mcore_to_hf(tmp_path / "kept", tmp_path / "late", dtype=name)
    original = load(source)
    for back in (tmp_path / "early", tmp_path / "late"):
        for key, tensor in load(back).items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, original[key].to(dtype)), key
        config = json.loads((back / "config.json").read_text())
        assert config["dtype"] == config["text_config"]["dtype"] == str(dtype).split(".")[1]


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_a_section_that_states_another_dtype_is_put_right(section: str) -> None:
    """transformers follows the top level, and vLLM the language model's section."""
    config: Any = {"model_type": "qwen3_vl", "dtype": "bfloat16"}
    config |= {"text_config": {}, "vision_config": {}}
    held = [TensorSpec(torch.bfloat16, (3, 5)), TensorSpec(torch.float32, (7,))]
    assert dtype_to_state(config, held) is None
    config[section]["dtype"] = "float32"
    assert dtype_to_state(config, held) == torch.bfloat16
    config[section] = {"torch_dtype": "bfloat16"}
    assert dtype_to_state(config, held) is None


def test_values_that_do_not_fit_the_dtype_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy(tiny("dense"), source)
    tensors = load(source)
    tensors["model.language_model.norm.weight"][3] = 1e6
    save(tensors, source)
    with pytest.raises(BadInput, match=r"norm\.weight holds 1e\+06.*float16"):
        hf_to_mcore(source, tmp_path / "mcore", dtype="fp16")
    assert not (tmp_path / "mcore").exists()


def test_plans_write_nothing_and_tell_all(tiny: Tiny, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan = plan_hf_to_mcore(tiny("moe"))
    assert sorted(tmp_path.rglob("*")) == before
    tensors = load(tiny("moe"))
    assert plan.nbytes == sum(t.nbytes for t in tensors.values())
    assert plan.nbytes == sum(tensor.nbytes for tensor in plan.planned)
    assert {name for tensor in plan.planned for name in tensor.sources} == set(tensors)
    summary = hf_to_mcore(tiny("moe"), tmp_path / "mcore")
    assert (summary.tensors, summary.nbytes) == (plan.tensors, plan.nbytes)
    back = plan_mcore_to_hf(tmp_path / "mcore")
    assert {tensor.target: tensor.shape for tensor in back.planned} == {
        name: tuple(t.shape) for name, t in tensors.items()
    }
    assert back.nbytes == plan.nbytes


def test_progress_adds_up(tiny: Tiny, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    hf_to_mcore(tiny("dense"), tmp_path / "mcore", progress=lambda *c: calls.append(c))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] == plan_hf_to_mcore(tiny("dense")).nbytes
    assert "embedding.word_embeddings.weight" in {call[2] for call in calls}


def test_workers_do_not_change_a_byte(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (to_mcore, to_hf):
        monkeypatch.setattr(module, "unit_bytes", lambda total: 100_000)
    for workers in (1, 3):
        mcore = tmp_path / f"mcore-{workers}"
        hf_to_mcore(tiny("moe"), mcore, workers=workers)
        mcore_to_hf(mcore, tmp_path / f"back-{workers}", workers=workers, max_shard_size="900KB")
    assert len(list((tmp_path / "mcore-1" / "release").glob("__0_*.distcp"))) > 5
    for name in ("mcore", "back"):
        assert tree_digests(tmp_path / f"{name}-1") == tree_digests(tmp_path / f"{name}-3")


FUSED = "model.language_model.layers.1.mlp.experts.gate_up_proj"
NORM = "model.visual.merger.norm.weight"
NOTE = f"2 tensors have NaN or infinite values: {FUSED}, {NORM}."


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("damaged") / "hf", moe=True)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors[FUSED][3, 2, 1] = torch.nan
    tensors[NORM][0], tensors[NORM][1] = torch.inf, -torch.inf  # whose sum is NaN
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_every_direction_says_so(damaged: Path, tmp_path: Path) -> None:
    assert NOTE in hf_to_mcore(damaged, tmp_path / "mcore").notes
    assert NOTE in mcore_to_hf(tmp_path / "mcore", tmp_path / "back").notes
    assert NOTE in hf_to_hf(damaged, tmp_path / "hf", expert_layout="published").notes
    legacy = hf_to_mcore(damaged, tmp_path / "legacy", format="torch", layout=Layout(tp=2))
    assert NOTE in legacy.notes


def test_a_sound_checkpoint_has_no_note(moe: Path, tmp_path: Path) -> None:
    assert not any("NaN" in note for note in hf_to_mcore(moe, tmp_path / "mcore").notes)


def test_strict_writes_nothing(damaged: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckFailed, match=r"2 tensors have NaN .* Nothing was written"):
        hf_to_mcore(damaged, tmp_path / "mcore", strict=True)
    assert sorted(tmp_path.iterdir()) == before
    assert NOTE in hf_to_mcore(damaged, tmp_path / "mcore").notes


def test_the_commands(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (
        (["convert", "hf-to-mcore", str(damaged), str(tmp_path / "mcore")], 0),
        (["convert", "hf-to-mcore", str(damaged), str(tmp_path / "other"), "--strict"], 1),
        (["verify", "roundtrip", str(damaged)], 0),
        (["verify", "roundtrip", str(damaged), "--strict"], 1),
    ):
        assert exit_code(*words) == code
        printed = "".join(capsys.readouterr())
        assert "2 tensors have NaN or infinite values" in " ".join(printed.split())


Damage = Callable[[Path], object]


def test_existing_target_is_left_alone(tiny: Tiny, mcore_dense: Path, tmp_path: Path) -> None:
    target = copy(mcore_dense, tmp_path / "mcore")
    before = tree_digests(tmp_path)
    with pytest.raises(BadInput, match=r"mcore exists.*--force"):
        hf_to_mcore(tiny("moe"), target)
    with pytest.raises(BadInput, match=r"mcore exists.*--force"):
        mcore_to_hf(mcore_dense, target)
    assert tree_digests(tmp_path) == before


def test_force_replaces_a_checkpoint(tiny: Tiny, mcore_dense: Path, tmp_path: Path) -> None:
    target = copy(mcore_dense, tmp_path / "mcore")
    (target / "left over").touch()
    hf_to_mcore(tiny("moe"), target, force=True)
    hf_to_mcore(tiny("moe"), tmp_path / "fresh")
    assert tree_digests(target) == tree_digests(tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "mcore"]


def test_force_with_a_bad_source_leaves_the_target(
    tiny: Tiny, mcore_dense: Path, tmp_path: Path
) -> None:
    source = copy(tiny("dense"), tmp_path / "source")
    target = copy(mcore_dense, tmp_path / "mcore")
    cut(source / "model.safetensors", 10_000)
    before = tree_digests(tmp_path)
    with pytest.raises(BadInput, match="not a complete safetensors file"):
        hf_to_mcore(source, target, force=True)
    assert tree_digests(tmp_path) == before


def test_force_does_not_delete_other_things(tiny: Tiny, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match="something other than a checkpoint"):
        hf_to_mcore(tiny("dense"), home, force=True)
    with pytest.raises(BadInput, match="not a directory"):
        hf_to_mcore(tiny("dense"), home / "thesis.txt", force=True)
    assert (home / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("inside", [".", "mcore", ".."])
def test_target_and_source_must_be_apart(tiny: Tiny, tmp_path: Path, inside: str) -> None:
    source = copy(tiny("dense"), tmp_path / "source")
    before = tree_digests(tmp_path)
    with pytest.raises(BadInput, match=r"apart from the source|other than a checkpoint"):
        hf_to_mcore(source, source / inside, force=True)
    assert tree_digests(tmp_path) == before


BF16 = torch.bfloat16


def transformers_bytes(file: Path) -> int:
    """Count the bytes of the weights in Hugging Face's model, without our code."""
    import transformers

    config = json.loads(file.read_text())
    name = config["architectures"][0]
    described = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    with torch.device("meta"):
        model = getattr(transformers, name)(described.from_dict(config))
    return sum(p.numel() for p in model.parameters()) * BF16.itemsize


@pytest.mark.parametrize("model", ["2b", "30b_a3b", "235b_a22b"])
def test_bytes_are_those_of_transformers_model(model: str) -> None:
    file = PUBLISHED / f"{model}.json"
    assert estimate(file).nbytes == transformers_bytes(file)


def test_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PUBLISHED / "235b_a22b.json")
    options = ["--workers", "8", "--disk-gb-per-s", "2", "--json"]
    assert exit_code("inspect", "--hf-config", file, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["nbytes"] / 1e9) == 471  # as published
    assert found["largest_slice_bytes"] == 4096 * 2 * 1536 * 2  # one expert's gate and up
    assert found["memory_bound_bytes"] == 2**30 + 8 * found["largest_slice_bytes"]
    assert found["seconds"] == pytest.approx(2 * 471 / 2, rel=0.01)
    assert found["units"] > 200


@pytest.mark.parametrize("layout", ["published", "v5"])
def test_no_slice_is_larger(layout: Any) -> None:
    """Neither stream yields more for any row of 235B-A22B, tried with meta tensors."""
    architecture = Architecture.from_hf(PUBLISHED / "235b_a22b.json")
    rows = table(architecture, expert_layout=layout)
    most = max(slice_bytes(row, BF16) for row in rows)
    seen = 0
    for row in rows:
        if row.offset and (row.offset[0] > 1 or row.offset[-1] > 1):
            continue  # these repeat the same shapes
        how, limit = row.rearrangement, max_rows(row, BF16)
        sources = [torch.empty(s.piece_shape, dtype=BF16, device="meta") for s in row.sources]
        stored = torch.empty(row.shape, dtype=BF16, device="meta")
        columns = tuple(slice(0, n) for n in row.shape[1:])
        rows_at_once = row.shape[0] if how.transposed else limit
        there = list(how.stream(lambda i, box, s=sources: s[i][box], columns, rows_at_once))
        back = [
            list(how.stream_back(n, lambda box, s=stored: s[box], columns, limit))
            for n in range(len(sources))
        ]
        for pieces, whole in ((there, [stored]), *zip(back, [[s] for s in sources], strict=True)):
            assert sum(p.nbytes for p in pieces) == sum(w.nbytes for w in whole)
            assert max(p.nbytes for p in pieces) <= slice_bytes(row, BF16) <= most
            seen += len(pieces)
    assert seen > 1000
    assert most <= 32 * 2**20


def test_text_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PUBLISHED / "2b.json")
    exit_code("inspect", "--hf-config", file, "--disk-gb-per-s", "1.5", "--workers", "2")
    text = capsys.readouterr().out
    for part in ("4.26 GB", "units of work", "for 2 workers", "6 s to read and write", "1.5 GB/s"):
        assert part in text
    exit_code("inspect", "--hf-config", file, "--workers", "1")
    assert "for 1 worker\n" in capsys.readouterr().out
    assert exit_code("inspect") == 2
    for options in ({"workers": 0}, {"disk_gb_per_s": 0.0}, {"disk_gb_per_s": float("nan")}):
        with pytest.raises(BadInput, match="must be positive"):
            estimate(file, **options)
