"""Exports load strictly in transformers and give the source's logits, in both forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.hf.config_file import with_layout
from mcore_qwen3vl.verify.checkpoints import TENSORS, compare_checkpoints
from mcore_qwen3vl.verify.measurement import measure
from mcore_qwen3vl.verify.parity.comparison import TOLERANCE
from tests.converters.checkpoints import assert_same_tensors, load

Tiny = Callable[[str], Path]


def load_model(path: Path) -> Any:
    """Load the HF model; fail if any tensor is missing, unexpected or of another shape."""
    from transformers import AutoModelForImageTextToText

    model, report = AutoModelForImageTextToText.from_pretrained(
        path, output_loading_info=True, dtype="auto", attn_implementation="eager"
    )
    problems = {kind: names for kind, names in report.items() if names}
    assert not problems
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits of text and one image."""
    config = model.config
    patches = 4 * 4
    image = [config.vision_start_token_id] + [config.image_token_id] * (patches // 4)
    tokens = [5, 7, 11, *image, config.vision_end_token_id, 13, 17, 19]
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(patches, width, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([tokens])
    return model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == config.image_token_id).int(),
        pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    ).logits


CASES = ["dense-tied", "dense", "dense-v5", "moe", "moe-v5", "mixed-listed"]
EXPORTS = [
    *((case, layout) for case in CASES for layout in ("source", "published", "v5")),
    # transformers 5 decides by shape and takes any square tensor for published, so it cannot
    # judge a square v5 export; `test_layouts_are_transposes_of_each_other` does.
    ("moe-H=2I", "source"),
    ("moe-H=2I", "published"),
]


@pytest.mark.parametrize(("case", "layout"), EXPORTS)
def test_transformers_makes_the_same_model(
    tiny: Tiny, tmp_path: Path, case: str, layout: Any
) -> None:
    source, back = tiny(case), tmp_path / "back"
    hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", back, expert_layout=layout)
    found, wanted = load_model(back), load_model(source)
    weights = wanted.state_dict()
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.state_dict().items())
    # They are not equal bit for bit: rounding depends on how the weights lie in memory.
    assert measure(logits(found), logits(wanted)).relative <= TOLERANCE
    assert not compare_checkpoints(source, back).parts()["", TENSORS].failed
    declared = Architecture.from_hf(back).expert_layout
    if "moe" in case and layout != "source":
        assert declared == layout
    if layout == "source":
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(("moe", "v5"), marks=pytest.mark.slow),
        pytest.param(("moe-v5", "published"), marks=pytest.mark.slow),
        ("moe-H=I", "v5"),
        ("moe-H=2I", "v5"),
    ],
)
def test_layouts_are_transposes_of_each_other(
    tiny: Tiny, tmp_path: Path, pair: tuple[str, Any]
) -> None:
    case, layout = pair
    hf_to_mcore(tiny(case), tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", expert_layout=layout)
    source, back = load(tiny(case)), load(tmp_path / "back")
    assert set(source) == set(back)
    for name, tensor in source.items():
        want = tensor.transpose(1, 2) if ".experts." in name else tensor
        assert torch.equal(back[name], want), name
    # Back again, through the other layout.
    hf_to_mcore(tmp_path / "back", tmp_path / "mcore-2")
    original = "published" if layout == "v5" else "v5"
    mcore_to_hf(tmp_path / "mcore-2", tmp_path / "back-2", expert_layout=original)
    assert_same_tensors(tiny(case), tmp_path / "back-2")


@pytest.mark.parametrize("case", ["dense-tied", "dense", "moe", "yarn"])
def test_converted_config_means_the_same(tiny: Tiny, case: str) -> None:
    config = json.loads((tiny(case) / "config.json").read_text())
    v5 = with_layout(config, "v5")
    published = with_layout(v5, "published")
    for changed in (v5, published):
        a, b = Architecture.from_hf(config), Architecture.from_hf(changed)
        fields = {name: getattr(a, name) for name in a.__dataclass_fields__}
        fields.pop("expert_layout")
        assert fields == {name: getattr(b, name) for name in fields}
    assert published["text_config"]["rope_scaling"] == config["text_config"]["rope_scaling"]
    assert published["text_config"]["rope_theta"] == config["text_config"]["rope_theta"]
    assert v5["text_config"].keys() & {"rope_scaling", "rope_theta", "num_experts"} == set()
    assert published["text_config"].keys() & {"rope_parameters", "num_local_experts"} == set()
