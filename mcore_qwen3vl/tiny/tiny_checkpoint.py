"""A tiny Qwen3-VL checkpoint that Hugging Face transformers loads, or a large one's files alone."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import ExpertLayout
from mcore_qwen3vl.tiny.processor import TINY, Vocabulary, write_processor

_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_MOST_PIXELS = 1 << 22  # the largest image; large enough that none is shrunk

# Sizes that meet in a tensor are all different, so that a swapped or transposed tensor cannot keep
# its shape by accident.
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 104,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [5, 4, 3], "rope_type": "default"},
    "rope_theta": 5000000,
    "use_cache": True,
}
SERVABLE: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 96,
    "rope_scaling": {**TEXT["rope_scaling"], "mrope_section": [12, 10, 10]},
}
"""Overrides of the text config for vLLM's CPU kernels: attention needs a common head size, and
experts need a hidden size that 32 divides."""
YARN: dict[str, Any] = {
    "max_position_embeddings": 256,
    "rope_scaling": {
        **TEXT["rope_scaling"],
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
"""Overrides of the text config for a longer context by YaRN: the first frequency stays, the second
is between, and the others are divided by the factor."""
MOE: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 36,
    "norm_topk_prob": True,
    "num_experts": 12,
    "num_experts_per_tok": 3,
}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [1, 2, 3],
    "depth": 5,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "num_heads": 4,
    "num_position_embeddings": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def tiny_config(
    *,
    moe: bool = False,
    tie: bool = False,
    dtype: str = "float32",
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    vocabulary: Vocabulary = TINY,
) -> dict[str, Any]:
    """Make a ``config.json`` in the published form (transformers 4.57), with overrides."""
    model_type = "qwen3_vl_moe" if moe else "qwen3_vl"
    special = vocabulary.special
    text_config = {**TEXT, **(MOE if moe else {}), "vocab_size": vocabulary.size, **(text or {})}
    text_config |= {
        "bos_token_id": special["<|endoftext|>"],
        "dtype": dtype,
        "eos_token_id": special["<|im_end|>"],
        "model_type": f"{model_type}_text",
    }
    if not moe:  # published text configs repeat the flag if dense, but not if MoE
        text_config["tie_word_embeddings"] = tie
    vision_config = {**VISION, "out_hidden_size": text_config["hidden_size"], **(vision or {})}
    config = {
        "architectures": [f"Qwen3VL{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": text_config,
        "tie_word_embeddings": tie,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {**vision_config, "model_type": model_type},
        **{name: special[token] for name, token in _TOKENS.items()},
    }
    # transformers adds to the rope_scaling that it gets, so the dict above must be copied.
    return deepcopy(config)


def write_tiny_checkpoint(
    path: str | Path,
    *,
    moe: bool = False,
    tie: bool = False,
    layout: ExpertLayout = "published",
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    vocabulary: Vocabulary = TINY,
) -> Path:
    """Write a Hugging Face checkpoint with random values in every tensor.

    Args:
        tie: whether to tie the head to the embedding, so that no ``lm_head.weight`` is stored.
        layout: ``published`` writes experts and config as transformers 4.57 does; ``v5`` writes
            the output of ``save_pretrained`` in the installed transformers.
        text, vision: fields that override those of the text and vision configs; `SERVABLE` is such
            a text config.
        vocabulary: the tokenizer's tokens and the rows of the embedding.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        moe=moe, tie=tie, dtype=dtype, text=text, vision=vision, vocabulary=vocabulary
    )
    model = _random_model(config, getattr(torch, dtype), seed)
    if layout == "v5":
        model.save_pretrained(path, max_shard_size=max_shard_size)
    else:
        _save_published(model, config, path, max_shard_size)
    write_processor(path, config["vision_config"], vocabulary)
    return path


def _random_model(config: dict[str, Any], dtype: torch.dtype, seed: int) -> Any:
    import transformers

    name = config["architectures"][0]
    config_class = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    hf_config = config_class.from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = getattr(transformers, name)(hf_config).to(dtype)
    model = model.to_empty(device="cpu")
    if config["tie_word_embeddings"]:
        model.tie_weights()
    _fill(model, seed)
    text = config["text_config"]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=text["bos_token_id"],
        eos_token_id=[text["eos_token_id"], text["bos_token_id"]],
        pad_token_id=text["bos_token_id"],
    )
    return model


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int) -> None:
    """Fill norm weights around one, biases around zero, matrices with unit gain; all are random."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.copy_(1 + 0.2 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.1 * noise)
        elif "embed" in name and "patch" not in name:
            parameter.copy_(noise)
        else:
            experts = parameter.ndim == 3
            fan_in = parameter.shape[-1] if experts else parameter[0].numel()
            parameter.copy_(noise / fan_in**0.5)


def _save_published(model: Any, config: dict[str, Any], path: Path, max_shard_size: str) -> None:
    """Save in the form of transformers 4.57: its config, experts as [E, H, 2I] and [E, I, H]."""
    from huggingface_hub import save_torch_state_dict

    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config["tie_word_embeddings"])
    }
    save_torch_state_dict(tensors, path, max_shard_size=max_shard_size)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(path)


def write_random_weights(config: Path, out: Path, *, layers: int | None = None) -> Path:
    """Write a checkpoint of a published size with random bfloat16 values in every tensor.

    It has no tokenizer and no processor. The rows of the embedding have unit length, so that logits
    of a tied head are about one: larger ones would leave gradients to the likeliest tokens alone.

    Args:
        config: a ``config.json`` in the published form.
        layers: decoder layers, if not all of them.
    """
    fields: dict[str, Any] = json.loads(config.read_text("utf-8"))
    text = fields["text_config"]
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    model = _random_model(deepcopy(fields), torch.bfloat16, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(text["hidden_size"] ** -0.5)
    out.mkdir(parents=True)
    _save_published(model, fields, out, "5GB")
    return out


def write_stand_in(
    config: Path, out: Path, *, layers: int | None = None, vision_blocks: int | None = None
) -> None:
    """Write a config and a processor of a published size, without weights.

    They are for runs whose results do not matter, such as those on the pretended device.
    """
    fields: dict[str, Any] = json.loads(config.read_text("utf-8"))
    text, vision = fields["text_config"], fields["vision_config"]
    for name, token in _TOKENS.items():
        fields[name] = TINY.special[token]  # nothing else in the vocabulary matters
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    if vision_blocks is not None:
        vision["depth"] = vision_blocks
        vision["deepstack_visual_indexes"] = list(range(len(vision["deepstack_visual_indexes"])))
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(fields, indent=1), "utf-8")
    write_processor(out, vision)
    file = out / "processor_config.json"
    processor = json.loads(file.read_text("utf-8"))
    processor["image_processor"]["size"] = {"shortest_edge": 4096, "longest_edge": _MOST_PIXELS}
    file.write_text(json.dumps(processor), "utf-8")
