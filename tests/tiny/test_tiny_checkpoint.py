"""The tiny checkpoints, on which every other test relies, are sound."""

import json

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.tiny import tiny_config, write_tiny_checkpoint


@pytest.mark.parametrize(
    ("moe", "tie", "layout"),
    [(False, True, "published"), (False, False, "v5"), (True, False, "published"), (True, 0, "v5")],
)
def test_loads_in_transformers_with_every_tensor_random(tmp_path, moe, tie, layout):
    path = write_tiny_checkpoint(tmp_path / "hf", moe=moe, tie=bool(tie), layout=layout)
    model_class = transformers.AutoModelForImageTextToText
    _, info = model_class.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    tensors = load_file(path / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tie
    for name, tensor in tensors.items():
        assert tensor.std() > 0.01, f"{name} is constant"
    assert Architecture.from_hf(path).expert_layout == (layout if moe else None)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_qwen3_5_as_published(tmp_path, moe, tie):
    """Transformers loads all but the MTP layers, which it leaves out."""
    path = write_tiny_checkpoint(
        tmp_path / "hf", family="qwen3.5", moe=moe, tie=tie, dtype="bfloat16"
    )
    model_class = transformers.AutoModelForImageTextToText
    model, info = model_class.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.float().std() > 0.01, f"{name} is constant"
        in_float32 = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if in_float32 else torch.bfloat16), name
    theirs = {n for n in model.state_dict() if not (tie and n == "lm_head.weight")}
    mtp = tensors.keys() - theirs
    assert theirs <= tensors.keys()
    assert mtp == {n for n in tensors if n.startswith("mtp.")}
    assert tensors["mtp.fc.weight"].shape == (48, 96)
    fused = {"mtp.layers.0.mlp.experts.gate_up_proj": (12, 72, 48)} if moe else {}
    assert {n: tuple(t.shape) for n, t in tensors.items() if n in fused} == fused


def test_qwen3_5_as_transformers_saves_it(tmp_path):
    path = write_tiny_checkpoint(tmp_path / "hf", family="qwen3.5", moe=True, layout="v5")
    tensors = load_file(path / "model.safetensors")
    assert "model.language_model.layers.0.mlp.experts.11.up_proj.weight" in tensors
    assert not any(name.startswith("mtp.") for name in tensors)


def test_published_experts_are_transposed_against_v5(tmp_path):
    """The same seed gives the same model in both layouts, with expert tensors transposed."""
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    published = load_file(write_tiny_checkpoint(tmp_path / "a", moe=True) / "model.safetensors")
    v5 = load_file(
        write_tiny_checkpoint(tmp_path / "b", moe=True, layout="v5") / "model.safetensors"
    )
    assert published[name].shape == (12, 48, 72)
    assert torch.equal(published[name].transpose(1, 2), v5[name])


def test_sharded_and_overridden(tmp_path):
    path = write_tiny_checkpoint(
        tmp_path, max_shard_size="100KB", text={"num_hidden_layers": 6}, vision={"depth": 4}
    )
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    architecture = Architecture.from_hf(path)
    assert (architecture.num_hidden_layers, architecture.vision.depth) == (6, 4)


def test_processor_renders_a_conversation_with_an_image(tmp_path):
    processor = transformers.AutoProcessor.from_pretrained(write_tiny_checkpoint(tmp_path))
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=[Image.new("RGB", (64, 40))], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 10, 16]]
    assert (inputs["input_ids"] == Architecture.from_hf(tmp_path).image_token_id).sum() == 40
    assert processor.decode(inputs["input_ids"][0]).endswith("<|im_start|>assistant\n")


def test_using_one_config_leaves_the_next_one_alone():
    """A config shares nothing with the next: transformers writes rope_theta into rope_scaling."""
    fresh = tiny_config()
    tiny_config()["text_config"]["rope_scaling"]["rope_theta"] = 1.0
    assert tiny_config() == fresh
