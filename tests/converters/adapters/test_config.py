"""An adapter's config selects what PEFT selects, and nothing is skipped silently."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, preset_targets, resolve_targets
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import tiny_config

DENSE, MOE = tiny_config(), tiny_config(moe=True)
MIXED = tiny_config(moe=True, text={"mlp_only_layers": [1]})
LAYER = "model.language_model.layers.1."


@pytest.mark.parametrize("config", [DENSE, MOE, MIXED], ids=["dense", "moe", "mixed"])
def test_presets(config: dict[str, Any]) -> None:
    """Each preset adds a part to the one before; the last leaves out only head and router."""
    architecture = Architecture.from_hf(config)
    found = []
    for name in ("language", "language-aligner", "all"):
        modules, parameters = preset_targets(name, architecture)
        wanted = AdapterConfig(target_modules=modules, target_parameters=parameters)
        found.append(set(resolve_targets(wanted, config)))
    language, aligner, everything = found
    assert not {name for name in language if "visual" in name}
    assert aligner - language == {name for name in aligner if "merger" in name}
    assert everything - aligner == {name for name in everything if "visual.blocks" in name}
    matrices = {
        name
        for name, shape in hf_shapes(table(architecture)).items()
        if len(shape) in (2, 3) and "embed" not in name
    }
    left = {name for name in matrices - everything if not name.endswith("mlp.gate.weight")}
    assert left == {"lm_head.weight"}
    with pytest.raises(BadInput, match="not one of language, language-aligner, all"):
        preset_targets("vision", architecture)


EXPERTS = ("mlp.experts.gate_up_proj",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ("nothing",)}, "not found in the base model"),
        ({"target_modules": ("q_proj", "gate_proj")}, "names 'gate_proj', which matches nothing"),
        ({"target_modules": ("q_proj", "gate_up_proj")}, "name it in target_parameters"),
        ({"target_modules": ("q_proj", "experts")}, "name mlp.experts.gate_up_proj and"),
        ({"target_modules": r".*(q_proj|mlp\.gate)"}, "name mlp.gate.weight in target_parameters"),
        ({"target_modules": ("gate",)}, "name mlp.gate.weight in target_parameters"),
        ({"target_parameters": (*EXPERTS, "mlp.experts")}, "name it in target_modules"),
        ({"target_modules": ("proj",)}, "use `attn.proj`"),
        ({"target_modules": ("embed_tokens",)}, "embed_tokens.weight is not supported"),
        ({"target_modules": ("pos_embed",)}, "pos_embed.weight is not supported"),
        ({"target_parameters": ("embed_tokens.weight",)}, "name its module in modules_to_save"),
        ({"target_modules": ("q_norm",)}, "RMSNorm"),
        ({"target_modules": "("}, "unterminated subpattern"),
        ({}, "PEFT does not apply"),
        ({"target_modules": ("q_proj",), "rank_pattern": {"k_proj": 2}}, "rank_pattern has the"),
        ({"target_modules": ("q_proj",), "alpha_pattern": {"x": 2}}, "alpha_pattern has the key"),
        ({"target_modules": ("q_proj",), "exclude_modules": ("x",)}, "exclude_modules names 'x'"),
        ({"target_modules": ("q_proj",), "layers_to_transform": (0, 4)}, "names layer 4"),
        ({"target_modules": ("q_proj",), "modules_to_save": ("x",)}, "modules_to_save names 'x'"),
        ({"target_parameters": EXPERTS, "lora_dropout": 0.1}, "no dropout for parameters"),
        ({"target_modules": ("q_proj",), "raw": {"use_dora": True}}, "DoRA"),
        ({"target_modules": ("q_proj",), "raw": {"lora_bias": True}}, "a bias in lora_B"),
        ({"target_modules": ("q_proj",), "raw": {"bias": "all"}}, "trains biases"),
        ({"target_modules": ("q_proj",), "raw": {"init_lora_weights": "pissa"}}, "pissa"),
    ],
)
def test_what_would_be_skipped_or_is_not_supported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("(", r"\(")) as error:
        resolve_targets(AdapterConfig(**fields), MOE)
    assert "\n" not in str(error.value)


def test_the_head_of_a_tied_model_is_not_tied_to_an_embedding_that_trains() -> None:
    config = AdapterConfig(target_modules=("lm_head",), ensure_weight_tying=True)
    with pytest.raises(BadInput, match=r"embed_tokens\.weight is not supported"):
        resolve_targets(config, tiny_config(tie=True))
    assert "lm_head.weight" in resolve_targets(
        AdapterConfig(target_modules=("lm_head",)), tiny_config(tie=True)
    )
