"""Reading config.json in both forms, and refusing what is not Qwen3-VL."""

import json

import pytest

from mcore_qwen3vl.config import Architecture, declared_expert_layout
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import YARN, tiny_config


def as_v5(config: dict) -> dict:
    """Return the config of the same model in the form of transformers 5."""
    config = json.loads(json.dumps(config))
    text = config["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    return config | {"transformers_version": "5.23.0"}


@pytest.mark.parametrize("moe", [False, True])
def test_both_forms_give_one_architecture(moe):
    config = tiny_config(moe=moe, text={**YARN, "rope_theta": 123456})
    old, new = Architecture.from_hf(config), Architecture.from_hf(as_v5(config))
    layouts = (old.expert_layout, new.expert_layout)
    assert layouts == (("published", "v5") if moe else (None, None))
    assert old.rope_theta == 123456.0
    assert dict(old.rope_scaling) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0
    }  # fmt: skip
    assert {**vars(old), "expert_layout": None} == {**vars(new), "expert_layout": None}


def test_top_level_decides_tying():
    config = tiny_config(tie=False)
    config["text_config"]["tie_word_embeddings"] = True
    assert Architecture.from_hf(config).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (False, True, False, False)),
    ],
)
def test_moe_layers(text, expected):
    architecture = Architecture.from_hf(tiny_config(moe=True, text=text))
    assert architecture.moe_layers == expected
    assert architecture.mixed_layers


def test_contradicting_declarations_are_an_error():
    config = tiny_config(moe=True) | {"transformers_version": "5.1.0"}
    with pytest.raises(BadInput, match=r"transformers_version 5\.1\.0 says v5.*says published"):
        declared_expert_layout(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_vl"}, "model_type 'qwen2_vl'"),
        ({"text_config": None}, "no text_config"),
        ({"image_token_id": "x"}, "image_token_id is 'x'"),
    ],
)
def test_not_qwen3_vl(change, message):
    with pytest.raises(BadInput, match=message):
        Architecture.from_hf(tiny_config() | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"rope_theta": None}, "no rotary base"),
        ({"rope_scaling": {"mrope_section": [5, 4, 4]}}, "half of head_dim 24"),
        ({"rope_scaling": {"mrope_section": [5, 4, 3], "rope_type": "dynamic"}}, "'dynamic'.*yarn"),
        ({"rope_scaling": {"mrope_section": [5, 4, 3], "rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {**YARN["rope_scaling"], "factor": None}}, "factor is None"),
        ({"rope_scaling": {**YARN["rope_scaling"], "factor": 0}}, "factor of rope_type yarn is 0"),
        ({"rope_scaling": {**YARN["rope_scaling"], "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unusable_text_config(text, message):
    with pytest.raises(BadInput, match=message):
        Architecture.from_hf(tiny_config(text=text))


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"hidden_act": "gelu"}, "vision_config.hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "rope_theta is 5000000"),
        ({"deepstack_visual_indexes": [1, 5]}, "must name distinct layers below the depth 5"),
        ({"depth": "5"}, "depth is '5'"),
    ],
)
def test_unusable_vision_config(vision, message):
    with pytest.raises(BadInput, match=message):
        Architecture.from_hf(tiny_config(vision=vision))


def test_unreadable_file(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        Architecture.from_hf(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        Architecture.from_hf(tmp_path)
