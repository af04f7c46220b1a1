"""The comparison finds one flipped bit anywhere, and names what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.verify.checkpoints import FILES, TENSORS, compare_checkpoints
from mcore_qwen3vl.verify.report import Report
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
        *slow(
            "lm_head.weight",
            "model.visual.pos_embed.weight",
            f"{LAYER}mlp.experts.down_proj",
        ),
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
