"""Hugging Face -> mcore -> Hugging Face gives back every bit, and a target is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.converters.convert import (
    hf_to_hf,
    hf_to_mcore,
    mcore_to_hf,
    plan_hf_to_mcore,
    plan_mcore_to_hf,
)
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
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
