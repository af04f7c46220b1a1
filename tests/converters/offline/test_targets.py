"""An existing target is left alone, or replaced only when that is safe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import copy, cut, tree_digests

Tiny = Callable[[str], Path]
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


def test_missing_source(tmp_path: Path) -> None:
    for convert in (hf_to_mcore, mcore_to_hf):
        with pytest.raises(BadInput, match="nowhere is not a directory"):
            convert(tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
