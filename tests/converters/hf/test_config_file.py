"""A converted config says what the converted weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.hf.config_file import dtype_to_state, in_transformers_form
from mcore_qwen3vl.converters.hf.shards import TensorSpec
from tests.converters.checkpoints import load

Tiny = Callable[[str], Path]


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


@pytest.mark.parametrize("case", ["dense-tied", "dense", "moe", "yarn"])
def test_converted_config_means_the_same(tiny: Tiny, case: str) -> None:
    config = json.loads((tiny(case) / "config.json").read_text())
    v5 = in_transformers_form(config, "v5")
    published = in_transformers_form(v5, "published")
    for changed in (v5, published):
        a, b = Architecture.from_hf(config), Architecture.from_hf(changed)
        fields = {name: getattr(a, name) for name in a.__dataclass_fields__}
        fields.pop("expert_layout")
        assert fields == {name: getattr(b, name) for name in fields}
    assert published["text_config"]["rope_scaling"] == config["text_config"]["rope_scaling"]
    assert published["text_config"]["rope_theta"] == config["text_config"]["rope_theta"]
    assert v5["text_config"].keys() & {"rope_scaling", "rope_theta", "num_experts"} == set()
    assert published["text_config"].keys() & {"rope_parameters", "num_local_experts"} == set()
