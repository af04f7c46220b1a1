"""Rotary angles of plain and of scaled rope equal Hugging Face's at every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.model.decoder.attention import InterleavedMRoPE, rotary_factor
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

DOCUMENTED = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}
"""Qwen's documented extension to a million tokens."""
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": DOCUMENTED,
    "yarn, older key": {**DOCUMENTED, "rope_type": None, "type": "yarn"},
    "yarn, original length left out": {"rope_type": "yarn", "factor": 4.0},
    "yarn, every option": {
        **DOCUMENTED,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn, attention_factor": {**DOCUMENTED, "attention_factor": 1.25},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_equals_hugging_face(name: str) -> None:
    config = read_config_file(SHAPES / "8b.json")
    text = config["text_config"]
    plain = InterleavedMRoPE(Architecture.from_hf(config))
    given = {key: value for key, value in SCALED[name].items() if value is not None}
    rope = {key: value for key, value in text["rope_scaling"].items() if key != "rope_type"}
    text |= {"rope_scaling": rope | given, "max_position_embeddings": 1_000_000}
    architecture = Architecture.from_hf(config)
    ours = InterleavedMRoPE(architecture)
    reference = Qwen3VLTextRotaryEmbedding(AutoConfig.for_model(**config).text_config)
    positions = torch.randint(0, 1_000_000, (3, 2, 64), generator=torch.Generator().manual_seed(1))
    angles = ours(positions).squeeze(2).transpose(0, 1)  # (B, S, D)
    cosine, sine = reference(torch.zeros(1), positions)
    assert torch.equal(angles.cos() * ours.attention_scaling, cosine)
    assert torch.equal(angles.sin() * ours.attention_scaling, sine)
    scale = transformer_config(architecture).softmax_scale or architecture.head_dim**-0.5
    assert scale == pytest.approx(reference.attention_scaling**2 / architecture.head_dim**0.5)
    same = torch.equal(ours.inverse_frequency, plain.inverse_frequency)
    assert same == (name == "default")


@pytest.mark.parametrize("name", ["default", "yarn"])
def test_a_part_of_each_head_turns_as_in_hugging_face(name: str) -> None:
    config = tiny_config(family="qwen3.5")
    text = config["text_config"]
    text |= {"max_position_embeddings": 1_000_000}
    text["rope_parameters"] |= SCALED[name]
    architecture = Architecture.from_hf(config)
    ours, factor = InterleavedMRoPE(architecture), rotary_factor(architecture)
    reference = Qwen3_5TextRotaryEmbedding(AutoConfig.for_model(**config).text_config)
    positions = torch.randint(0, 1_000_000, (3, 2, 64), generator=torch.Generator().manual_seed(1))
    angles = ours(positions).squeeze(2).transpose(0, 1)  # (B, S, R)
    cosine, sine = reference(torch.zeros(1), positions)
    assert torch.equal(angles.cos() * factor, cosine)
    assert torch.equal(angles.sin() * factor, sine)
    # The factor is not that of whole products, so that the scale is not to have it.
    assert transformer_config(architecture).softmax_scale is None
    assert (factor == 1) == (name == "default")
