"""HF to HF gives the same files as the way through Megatron-Core, which is proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_hf, hf_to_mcore, mcore_to_hf, plan_hf_to_hf
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import assert_same_files, assert_same_tensors, tree_digests

Tiny = Callable[[str], Path]


@pytest.mark.parametrize(
    ("case", "layout", "dtype"),
    [
        ("dense-tied", "v5", "keep"),
        ("moe", "published", "keep"),
        ("moe", "v5", "bf16"),
        ("moe-H=2I-v5", "published", "keep"),
        ("mixed-listed", "v5", "keep"),
        ("mixed-listed", "source", "bf16"),
    ],
)
def test_as_by_way_of_megatron(
    case: str, layout: str, dtype: str, tiny: Tiny, tmp_path: Path
) -> None:
    options = {"expert_layout": layout, "dtype": dtype, "max_shard_size": "300KB"}
    result = hf_to_hf(tiny(case), tmp_path / "straight", **options)
    hf_to_mcore(tiny(case), tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "around", **options)
    assert result.files > 1
    noted = any("only in the published layout" in note for note in result.notes)
    assert noted == (result.expert_layout == "v5")
    assert_same_tensors(tmp_path / "straight", tmp_path / "around")
    assert_same_files(tmp_path / "straight", tmp_path / "around")


def test_there_and_back(tiny: Tiny, tmp_path: Path) -> None:
    hf_to_hf(tiny("moe"), tmp_path / "v5", expert_layout="v5")
    hf_to_hf(tmp_path / "v5", tmp_path / "back", expert_layout="published")
    assert_same_tensors(tiny("moe"), tmp_path / "back")
    hf_to_hf(tmp_path / "back", tmp_path / "again", expert_layout="published", workers=1)
    assert tree_digests(tmp_path / "back") == tree_digests(tmp_path / "again")


def test_bad_input(tiny: Tiny, mcore_dense: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a Megatron-Core checkpoint"):
        plan_hf_to_hf(mcore_dense)
    with pytest.raises(BadInput, match="expert layout 'x' is not"):
        plan_hf_to_hf(tiny("moe"), expert_layout="x")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="apart from the source"):
        hf_to_hf(tiny("moe"), tiny("moe") / "inside")
    with pytest.raises(BadInput, match="exists"):
        hf_to_hf(tiny("moe"), tmp_path)
