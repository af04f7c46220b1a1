"""Reading config.json in both forms, and refusing what is no model that is handled."""

import json

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

from mcore_qwen3vl.config import NO_VISION, Architecture, declared_expert_layout
from mcore_qwen3vl.converters.hf.config_file import in_transformers_form
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import YARN, tiny_config
from mcore_qwen3vl.unused.folder import unused_of_config

WIDE = {"num_attention_heads": 4, "rope_scaling": {"mrope_section": [24, 20, 20]}}


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


IMPOSSIBLE = [
    ("text", {"hidden_size": None}, "hidden_size is None"),
    ("text", {"rope_theta": None}, "no rotary base"),
    ("text", {"rope_scaling": {"mrope_section": [5, 4, 4]}}, "half of head_dim 24"),
    (
        "text",
        {"rope_scaling": {"mrope_section": [5, 4, 3], "rope_type": "dynamic"}},
        "'dynamic'.*yarn",
    ),
    (
        "text",
        {"rope_scaling": {"mrope_section": [5, 4, 3], "rope_type": ["yarn"]}},
        "is not supported",
    ),
    ("text", {"rope_scaling": {**YARN["rope_scaling"], "factor": None}}, "factor is None"),
    ("text", {"rope_scaling": {**YARN["rope_scaling"], "factor": 0}}, "factor is 0"),
    ("text", {"rope_scaling": {**YARN["rope_scaling"], "beta_fast": "32"}}, "beta_fast is '32'"),
    ("text", {"attention_bias": True}, "attention_bias"),
    ("vision", {"hidden_act": "gelu"}, "vision_config.hidden_act is 'gelu'"),
    ("vision", {"rope_parameters": {"rope_theta": 5e6}}, "rope_theta is 5000000"),
    ("vision", {"deepstack_visual_indexes": [1, 5]}, "must name distinct layers below the depth 5"),
    ("vision", {"depth": "5"}, "depth is '5'"),
    ("vision", {"num_heads": 3}, "num_heads 3 heads"),
    ("vision", {"num_heads": 16}, "a multiple of 4"),
    ("vision", {"patch_size": 0}, "patch_size is 0"),
    ("vision", {"patch_size": [4, 4]}, "patch_size is \\[4, 4"),
    ("vision", {"spatial_merge_size": -2}, "spatial_merge_size is -2"),
    ("vision", {"temporal_patch_size": 2.0}, "temporal_patch_size is 2.0"),
    ("vision", {"depth": 0}, "depth is 0"),
    ("vision", {"in_channels": True}, "in_channels is True"),
    ("vision", {"num_position_embeddings": 0}, "num_position_embeddings is 0"),
    ("vision", {"out_hidden_size": 40}, "out_hidden_size of vision_config is 40"),
    ("vision", {"deepstack_visual_indexes": [-1]}, "distinct layers below"),
    ("vision", {"num_attention_heads": 2}, "num_heads is 4.*num_attention_heads"),
    ("vision", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ("text", {"vocab_size": 0}, "vocab_size is 0"),
    ("text", {"vocab_size": 288}, "video_token_id is 288"),
    ("text", {"hidden_size": 0}, "hidden_size is 0"),
    ("text", {"intermediate_size": 0}, "intermediate_size is 0"),
    ("text", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("text", {"num_attention_heads": 6}, "6 is not a multiple of num_key_value_heads 4"),
    ("text", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("text", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ("text", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ("text", {"rope_theta": -1}, "rope_theta is -1"),
    ("text", {"initializer_range": -0.1}, "initializer_range is -0.1"),
    ("text", {"rope_scaling": {"mrope_section": [14, -1, -1]}}, "mrope_section is"),
    ("text", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("text", {"layer_types": 4}, "layer_types"),
    ("text", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("text", {"dtype": "frob"}, "dtype is 'frob'"),
]


EXPERTS = [
    ("text", {"num_experts": 0}, "num_experts is 0"),
    ("text", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
    ("text", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("text", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ("text", {"mlp_only_layers": [4]}, "must name layers below"),
    ("text", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("text", {"head_dim": None, "num_attention_heads": 20}, "and there is no head_dim"),
]
HYBRID = [
    ("vision", {"deepstack_visual_indexes": [1]}, "has no DeepStack"),
    (
        "text",
        {"layer_types": ["linear_attention"] * 3},
        "names 3 layers, and num_hidden_layers is 4",
    ),
    ("text", {"layer_types": ["sliding_attention"] * 4}, "full_attention and linear_attention"),
    ("text", {"layer_types": [["full_attention"]] * 4}, "full_attention and linear_attention"),
    ("text", {"layer_types": ["linear_attention"] * 4}, "full_attention_interval 4 says"),
    ("text", {"full_attention_interval": 0}, "full_attention_interval is 0"),
    *(
        ("text", {name: 0}, f"{name} is 0")
        for name in (
            *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads"),
        )
    ),
    ("text", {"linear_num_value_heads": 6}, "6 is not a multiple of linear_num_key_heads 4"),
    ("text", {"attn_output_gate": False}, "attn_output_gate is False"),
    ("text", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
    ("text", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ("text", {"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers is -1"),
    ("text", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 0.25"),
    ("text", {"head_dim": 128}, "head_dim 128, of which 32 are rotated"),
    ("text", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, "1 at most"),
]
HYBRID_EXPERTS = [
    ("text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ("text", {"mlp_only_layers": [1]}, "names dense layers"),
    ("text", {"decoder_sparse_step": 2}, "names dense layers"),
    ("text", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
]


@pytest.mark.parametrize(
    ("family", "moe", "section", "change", "message"),
    [
        *(("qwen3-vl", moe, *row) for moe in (False, True) for row in IMPOSSIBLE),
        *(("qwen3-vl", True, *row) for row in EXPERTS),
        *(("qwen3.5", False, *row) for row in HYBRID),
        *(("qwen3.5", True, *row) for row in HYBRID_EXPERTS),
    ],
)
def test_what_is_impossible_names_its_field(family, moe, section, change, message):
    config = tiny_config(family=family, moe=moe)
    config[f"{section}_config"] |= change
    with pytest.raises(BadInput, match=message):
        Architecture.from_hf(config)


PLAIN_ROPE = {"rope_type": "default", "mrope_section": [5, 4, 3], "mrope_interleaved": True}
SCALED = {**PLAIN_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"rope_parameters": {**PLAIN_ROPE, "rope_theta": 5000000}, "rope_scaling": SCALED}, "two"),
        ({"rope_scaling": {**PLAIN_ROPE, "rope_theta": 1e4}}, "rope_theta is 5000000, and"),
        ({"rope_scaling": {**PLAIN_ROPE, "type": "yarn"}}, "rope_type is 'default', and type"),
        ({"torch_dtype": "bfloat16"}, "text_config.dtype is 'float32'.*torch_dtype"),
        ({"num_local_experts": 4, "num_experts": 8}, "one expert count"),
    ],
)
def test_two_forms_of_a_field_that_differ_are_refused(text, message):
    config = tiny_config(moe="num_experts" in text)
    config["text_config"] |= text
    with pytest.raises(BadInput, match=message):
        Architecture.from_hf(config)


def test_two_ropes_of_which_transformers_would_lose_the_base_are_refused():
    """The config of transformers 5 with the rope of its README added."""
    config = as_v5(tiny_config())
    config["text_config"]["rope_scaling"] = SCALED
    with pytest.raises(BadInput, match="gives two ropes that differ"):
        Architecture.from_hf(config)
    config["text_config"]["rope_parameters"] |= SCALED
    with pytest.raises(BadInput, match="gives two ropes that differ"):  # no rope_theta
        Architecture.from_hf(config)


def test_two_ropes_that_say_the_same_are_one():
    config = as_v5(tiny_config(text={**YARN}))
    wanted = Architecture.from_hf(config)
    config["text_config"]["rope_scaling"] = dict(config["text_config"]["rope_parameters"])
    assert Architecture.from_hf(config) == wanted
    for layout, name in (("published", "rope_scaling"), ("v5", "rope_parameters")):
        text = in_transformers_form(config, layout)["text_config"]
        assert Architecture.from_hf(in_transformers_form(config, layout)) == wanted
        assert text[name]["factor"] == 4.0
        assert text.get("rope_theta", 5000000) == 5000000


@pytest.mark.parametrize(
    ("moe", "text", "drop"),
    [
        (False, {"hidden_size": 1024, **WIDE}, ["head_dim"]),  # 128, not 1024 / 4
        (True, {"hidden_size": 1024, **WIDE, "rope_scaling": {"mrope_section": [128, 0, 0]}},
         ["head_dim"]),
        (False, {"num_key_value_heads": None}, []),
    ],
)  # fmt: skip
def test_what_is_left_out_is_as_in_transformers(moe, text, drop):
    config = tiny_config(moe=moe, text=text)
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    for name in drop:
        del config["text_config"][name]
    theirs = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(**json.loads(json.dumps(config)))
    ours = Architecture.from_hf(config)
    assert ours.head_dim == theirs.text_config.head_dim
    assert ours.num_key_value_heads == theirs.text_config.num_key_value_heads


def test_left_out_heads_and_layers_are_not_guessed():
    config = tiny_config()
    del config["text_config"]["num_key_value_heads"]
    with pytest.raises(BadInput, match="num_key_value_heads is None"):
        Architecture.from_hf(config)
    config = tiny_config(vision={"depth": 27})
    del config["vision_config"]["deepstack_visual_indexes"]
    assert Architecture.from_hf(config).vision.deepstack_visual_indexes == (8, 16, 24)


def test_unreadable_file(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        Architecture.from_hf(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        Architecture.from_hf(tmp_path)


def hybrid(moe: bool = False, **text: object) -> dict:
    return tiny_config(family="qwen3.5", moe=moe, text=text)


@pytest.mark.parametrize("moe", [False, True])
def test_a_hybrid_config_is_read_as_transformers_reads_it(moe):
    """The tiny config, and the same after transformers has read and written it."""
    config = hybrid(moe)
    theirs = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(**json.loads(json.dumps(config)))
    written = json.loads(json.dumps(theirs.to_dict()))
    for ours in (Architecture.from_hf(config), Architecture.from_hf(written)):
        text = theirs.text_config
        kinds = tuple(kind == "linear_attention" for kind in text.layer_types)
        assert ours.delta_net_layers == kinds == (True, True, True, False)
        assert vars(ours.delta_net) == {
            name.removeprefix("linear_"): value
            for name, value in vars(text).items()
            if name.startswith("linear_")
        }
        assert (ours.rotary_dim, ours.head_dim, ours.mrope_section) == (16, 64, (3, 3, 2))
        assert (ours.attn_output_gate, ours.zero_centered_norms) == (True, True)
        assert (ours.mtp_num_hidden_layers, ours.stacks_layers) == (1, False)
        assert ours.shared_expert_intermediate_size == (28 if moe else 0)
        assert ours.moe_layers == (moe,) * 4
        assert ours.expert_layout == ("v5" if moe else None)
        assert ours.vision.deepstack_visual_indexes == ()
        assert ours.family == type(theirs).__name__.removesuffix("Config")


@pytest.mark.parametrize("moe", [False, True])
def test_a_text_config_alone_is_the_same_language_model(moe):
    config = hybrid(moe)
    whole, alone = Architecture.from_hf(config), Architecture.from_hf(config["text_config"])
    of_vision = ("vision", "tie_word_embeddings", *(n for n in vars(whole) if n.endswith("_id")))
    assert {n: v for n, v in vars(whole).items() if n not in of_vision} == {
        n: v for n, v in vars(alone).items() if n not in of_vision
    }
    assert (alone.vision, alone.image_token_id) == (NO_VISION, -1)
    assert unused_of_config(config["text_config"]) == unused_of_config(config) == []


def test_layer_types_are_optional_and_so_is_the_interval():
    config = hybrid()
    wanted, text = Architecture.from_hf(config), config["text_config"]
    types = text.pop("layer_types")
    assert Architecture.from_hf(config) == wanted
    del text["full_attention_interval"]
    assert Architecture.from_hf(config) == wanted  # transformers' default
    text["layer_types"] = types[::-1]
    assert Architecture.from_hf(config).delta_net_layers == (False, True, True, True)


def test_a_config_without_a_further_layer_has_0_or_null_or_nothing():
    config = hybrid()
    for text in ({"mtp_num_hidden_layers": 0}, {"mtp_num_hidden_layers": None}, {}):
        del config["text_config"]["mtp_num_hidden_layers"]
        config["text_config"].update(text)
        assert Architecture.from_hf(config).mtp_num_hidden_layers == 0
