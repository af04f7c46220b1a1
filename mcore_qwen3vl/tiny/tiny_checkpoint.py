"""A tiny checkpoint that Hugging Face transformers loads, or a large one's files alone.

Its tokenizer, image and video processor and chat template work, and are made locally. The tokenizer
is a byte-level BPE like Qwen's, with a handful of merges and Qwen's special tokens.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

from mcore_qwen3vl.config import (
    LAYER_TYPES,
    MODEL_TYPES,
    ExpertLayout,
    declared_expert_layout,
    family_of,
    text_section,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.hf_kernels import without_gpu_kernels

_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġ s", "e r", "Ġt he", "a t", "i s", "e n", "o r",
    "Ġ w", "Ġ c", "i t", "o u", "e s", "a n", "Ġ i", "Ġ o", "Ġ b", "in g", "Ġ m", "e d", "a l",
)  # fmt: skip
_SPECIAL = (
    "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>",
)  # fmt: skip
_QWEN_SIZE = 151_936  # vocab_size of every published Qwen3-VL
_QWEN_TOKENS = 151_643  # tokens of the file; the special tokens come after them
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN_ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
"""Tokens that Qwen added after the special ones. Decoding keeps them."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a byte-level BPE tokenizer, with their ids."""

    size: int  # rows of the embedding, which are more than the tokens, as in published models
    tokens: dict[str, int]  # those that are not special, in the byte-level alphabet
    merges: list[tuple[str, str]]  # pairs of tokens, those merged first in front
    special: dict[str, int]
    added: dict[str, int] = field(default_factory=dict)
    """Tokens that are never split, but that are text of an answer."""

    def make_tokenizer(self) -> Any:
        """Make a ``Qwen2Tokenizer``."""
        from transformers import AddedToken, Qwen2Tokenizer

        tokenizer = Qwen2Tokenizer(
            vocab=self.tokens | self.special | self.added,
            merges=self.merges,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            model_max_length=4096,
        )
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False, special=True) for token in self.special],
            special_tokens=True,
        )
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        wanted = self.special | self.added
        got = {token: tokenizer.convert_tokens_to_ids(token) for token in wanted}
        if got != wanted:
            raise RuntimeError(f"added tokens landed at {got}, expected {wanted}")
        return tokenizer


def _tiny_vocabulary() -> Vocabulary:
    """Make a vocabulary of the 256 bytes, a few merges and Qwen's special tokens."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokens = {
        token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *map("".join, merges)])
    }
    special = {token: len(tokens) + i for i, token in enumerate(_SPECIAL)}
    return Vocabulary(352, tokens, merges, special)


TINY = _tiny_vocabulary()


def read_vocabulary(file: str | Path) -> Vocabulary:
    """Read Qwen's vocabulary, whose merges, tokens and added tokens have the published ids.

    The file is ``qwen.tiktoken``, which the package ``dashscope`` ships in ``dashscope/resources``:
    a line for each token, of its bytes in base64 and its rank. BadInput is raised if it is missing
    or another file, or if ``tiktoken`` is not installed.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if find_spec("tiktoken") is None:
        raise BadInput("A real vocabulary is read by tiktoken: uv pip install tiktoken.")
    remedy = "give qwen.tiktoken of the package dashscope"
    if not Path(file).is_file():
        raise BadInput(f"There is no file {file}: {remedy}.")
    try:
        tokens, merges = TikTokenConverter().extract_vocab_merges_from_model(str(file))
    except (ValueError, KeyError) as error:
        raise BadInput(f"{file} is no vocabulary in tiktoken's form ({error}): {remedy}.") from None
    if len(tokens) != _QWEN_TOKENS:
        raise BadInput(
            f"{file} has {len(tokens):,} tokens, and Qwen's vocabulary {_QWEN_TOKENS:,}: {remedy}."
        )
    return Vocabulary(
        _QWEN_SIZE,
        tokens,
        merges,
        {token: _QWEN_TOKENS + i for i, token in enumerate(_QWEN_SPECIAL)},
        {token: _QWEN_TOKENS + len(_QWEN_SPECIAL) + i for i, token in enumerate(_QWEN_ADDED)},
    )


FamilyName = Literal["qwen3-vl", "qwen3.5"]


def write_processor(
    path: Path,
    vision_config: dict[str, Any],
    vocabulary: Vocabulary = TINY,
    family: FamilyName = "qwen3-vl",
) -> None:
    """Save a ``Qwen3VLProcessor`` to `path`, with the patch sizes of `vision_config`.

    Pixel limits scale with the patch size: an image becomes 4 to 64 merged tokens, a video
    frame 4 to 16.
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    merge = vision_config["spatial_merge_size"]
    patch = vision_config["patch_size"]
    frames = vision_config["temporal_patch_size"]
    token_pixels = (merge * patch) ** 2
    common = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": frames,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image_size = {"shortest_edge": 4 * token_pixels, "longest_edge": 64 * token_pixels}
    video_size = {"shortest_edge": 4 * token_pixels, "longest_edge": 16 * 8 * token_pixels}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=image_size, **common),
        tokenizer=vocabulary.make_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(size=video_size, min_frames=2, fps=2, **common),
        chat_template=chat_template(family),
    )
    processor.save_pretrained(path)


def write_tokenizer(path: Path, family: FamilyName, vocabulary: Vocabulary = TINY) -> None:
    """Save a ``Qwen2Tokenizer`` with the chat template: all that a language model alone has."""
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.chat_template = chat_template(family)
    tokenizer.save_pretrained(path)


def chat_template(family: FamilyName = "qwen3-vl") -> str:
    """Return the chat template: ChatML turns, with a bracketed placeholder token for media.

    That of Qwen3.5 writes reasoning, tools and calls as the published one does, and reads
    ``enable_thinking`` and ``preserve_thinking``. If ``enable_thinking`` is not given, the model
    decides: unlike with the published one, a prompt then ends as Qwen3-VL's does, and an answer
    without reasoning has no empty block before it.
    """
    return files(__package__).joinpath(f"{family}.jinja").read_text(encoding="utf-8")


FAMILIES_WITHOUT_TOWER: tuple[FamilyName, ...] = ("qwen3.5",)
"""Those whose language model alone has a class in transformers."""

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
SERVABLE: dict[FamilyName, dict[str, Any]] = {
    "qwen3-vl": {
        "head_dim": 64,
        "hidden_size": 96,
        "rope_scaling": {**TEXT["rope_scaling"], "mrope_section": [12, 10, 10]},
    },
    "qwen3.5": {"hidden_size": 96, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
"""Overrides of the text config for vLLM's CPU kernels: attention needs a common head size, experts
need a hidden size that 32 divides, and gated delta nets need keys and values of 64 or of 128."""
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
# Wide heads, a large epsilon and slow decays keep float32 well-conditioned: a delta net divides its
# output by that output's size, and with published values HF's own gradients are off by 1e-4.
HYBRID_TEXT: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if not name.startswith("rope_")},
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 20,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
HYBRID_MOE: dict[str, Any] = {
    "moe_intermediate_size": 36,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 28,
}


def tiny_config(
    *,
    family: FamilyName = "qwen3-vl",
    moe: bool = False,
    tie: bool = False,
    text_only: bool = False,
    dtype: str = "float32",
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    vocabulary: Vocabulary = TINY,
) -> dict[str, Any]:
    """Make a ``config.json`` in the published form, with overrides.

    Raises:
        BadInput: transformers has no class for this family's language model alone.
    """
    if text_only and family not in FAMILIES_WITHOUT_TOWER:
        raise BadInput("Qwen3-VL's language model alone has no class in transformers: qwen3.5 has.")
    hybrid = family == "qwen3.5"
    model_type = f"{'qwen3_5' if hybrid else 'qwen3_vl'}{'_moe' if moe else ''}"
    special = vocabulary.special
    usual, experts = (HYBRID_TEXT, HYBRID_MOE) if hybrid else (TEXT, MOE)
    text_config = {**usual, **(experts if moe else {}), "vocab_size": vocabulary.size}
    text_config |= text or {}
    if hybrid:
        _set_layers(text_config, text_config["num_hidden_layers"])
    text_config |= {
        "bos_token_id": special["<|endoftext|>"],
        "dtype": dtype,
        "eos_token_id": special["<|im_end|>"],
        "model_type": f"{model_type}_text",
    }
    if not moe:  # published text configs repeat the flag if dense, but not if MoE
        text_config["tie_word_embeddings"] = tie
    if text_only:
        alone = MODEL_TYPES[text_config["model_type"]].model_class
        return deepcopy({**text_config, "architectures": [alone], "tie_word_embeddings": tie})
    vision_config = {**VISION, "out_hidden_size": text_config["hidden_size"]}
    vision_config |= {"deepstack_visual_indexes": []} if hybrid else {}
    vision_config |= vision or {}
    config = {
        "architectures": [MODEL_TYPES[model_type].model_class],
        "model_type": model_type,
        "text_config": text_config,
        "tie_word_embeddings": tie,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {**vision_config, "model_type": model_type},
        **{name: special[token] for name, token in _TOKENS.items()},
    }
    # transformers adds to the rope_scaling that it gets, so the dict above must be copied.
    return deepcopy(config)


def _set_layers(text: dict[str, Any], count: int) -> None:
    """Set the number of decoder layers, and their types where there are several."""
    text["num_hidden_layers"] = count
    if interval := text.get("full_attention_interval"):
        attention, delta_net = LAYER_TYPES
        types = [delta_net if (n + 1) % interval else attention for n in range(count)]
        text["layer_types"] = types


def write_tiny_checkpoint(
    path: str | Path,
    *,
    family: FamilyName = "qwen3-vl",
    moe: bool = False,
    tie: bool = False,
    text_only: bool = False,
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
        text_only: whether to write the language model alone, without a vision tower.
        family: ``qwen3.5`` has MTP layers (``mtp.*``), and `FLOAT32` weights in float32, as
            published.
        layout: ``published`` writes experts and config as they are published, which for Qwen3-VL
            is as transformers 4.57 does; ``v5`` writes the output of ``save_pretrained`` in the
            installed transformers, which leaves ``mtp.*`` out and has Qwen3.5's experts one by one.
        text, vision: fields that override those of the text and vision configs; `SERVABLE` has
            such text configs.
        vocabulary: the tokenizer's tokens and the rows of the embedding.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        family=family,
        moe=moe,
        tie=tie,
        text_only=text_only,
        dtype=dtype,
        text=text,
        vision=vision,
        vocabulary=vocabulary,
    )
    model = _random_model(config, getattr(torch, dtype), seed)
    if layout == "v5":
        model.mtp = None
        model.save_pretrained(path, max_shard_size=max_shard_size)
    else:
        _save_published(model, config, path, max_shard_size)
    if text_only:
        write_tokenizer(path, family, vocabulary)
    else:
        write_processor(path, config["vision_config"], vocabulary, family)
    return path


def _random_model(config: dict[str, Any], dtype: torch.dtype, seed: int) -> Any:
    """Make Hugging Face's model with random values; those of `FLOAT32` are in float32."""
    import transformers

    family, text = family_of(config), text_section(config)
    config_class = getattr(transformers, family.config_class)
    hf_config = config_class.from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"), without_gpu_kernels():
        model = getattr(transformers, family.model_class)(hf_config).to(dtype)
        if layers := text.get("mtp_num_hidden_layers"):
            decoder = model.model.language_model if family.has_vision else model.model
            model.mtp = _make_mtp(decoder.layers, hf_config.get_text_config(), layers)
            model.mtp.to(dtype)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(FLOAT32):
                parameter.data = parameter.data.float()
    model = model.to_empty(device="cpu")
    if config["tie_word_embeddings"]:
        model.tie_weights()
    _fill_at_random(model, seed, hybrid=family.hybrid)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=text["bos_token_id"],
        eos_token_id=[text["eos_token_id"], text["bos_token_id"]],
        pad_token_id=text["bos_token_id"],
    )
    return model


FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of tensors that published checkpoints keep in float32."""


def _make_mtp(layers: nn.ModuleList, config: Any, count: int) -> nn.Module:
    """Return the MTP layers, which transformers does not have.

    They are layers of the model, all with attention. Source: vLLM's ``Qwen3_5MultiTokenPredictor``.
    """
    kind, norm = type(layers[0]), type(layers[0].input_layernorm)
    attention = config.layer_types.index("full_attention")
    mtp, size = nn.Module(), (config.hidden_size, config.rms_norm_eps)
    mtp.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    mtp.layers = nn.ModuleList(kind(config, attention) for _ in range(count))
    mtp.norm, mtp.pre_fc_norm_hidden, mtp.pre_fc_norm_embedding = (norm(*size) for _ in range(3))
    return mtp


@torch.no_grad()
def _fill_at_random(model: nn.Module, seed: int, *, hybrid: bool) -> None:
    """Fill norms around the neutral weight, biases around 0, matrices with unit gain.

    All values are random. In a `hybrid` model the neutral weight of a norm is 0, but not in the
    vision tower or inside gated delta nets. The decays of gated delta nets are slow and fast.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(noise.sigmoid().mul(1.9).add(0.1).log())
        elif name.endswith("dt_bias"):
            parameter.copy_(2 * noise - 2)
        elif parameter.ndim == 1 and name.endswith("weight"):
            plain = not hybrid or "visual" in name or name.endswith("linear_attn.norm.weight")
            parameter.copy_(int(plain) + 0.2 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.1 * noise)
        elif "embed" in name and "patch" not in name:
            parameter.copy_(noise)
        else:
            experts = parameter.ndim == 3
            fan_in = parameter.shape[-1] if experts else parameter[0].numel()
            parameter.copy_(noise / fan_in**0.5)


def _save_published(model: Any, config: dict[str, Any], path: Path, max_shard_size: str) -> None:
    """Save in the published form: Qwen3-VL's experts are [E, H, 2I] and [E, I, H]."""
    from huggingface_hub import save_torch_state_dict

    turned = ".mlp.experts." if declared_expert_layout(config) == "published" else "no tensor"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if turned in name else tensor
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
    text = text_section(fields)
    _set_layers(text, layers or text["num_hidden_layers"])
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

    They are for runs whose results do not matter, such as those on the simulated GPU.
    """
    fields: dict[str, Any] = json.loads(config.read_text("utf-8"))
    text, architecture = text_section(fields), family_of(fields)
    family: FamilyName = "qwen3.5" if architecture.hybrid else "qwen3-vl"
    _set_layers(text, layers or text["num_hidden_layers"])
    if not architecture.has_vision:
        out.mkdir(parents=True)
        (out / "config.json").write_text(json.dumps(fields, indent=1), "utf-8")
        write_tokenizer(out, family)
        return
    vision = fields["vision_config"]
    for name, token in _TOKENS.items():
        fields[name] = TINY.special[token]  # nothing else in the vocabulary matters
    if vision_blocks is not None:
        vision["depth"] = vision_blocks
        vision["deepstack_visual_indexes"] = list(range(len(vision["deepstack_visual_indexes"])))
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(fields, indent=1), "utf-8")
    write_processor(out, vision, family=family)
    file = out / "processor_config.json"
    processor = json.loads(file.read_text("utf-8"))
    processor["image_processor"]["size"] = {"shortest_edge": 4096, "longest_edge": _MOST_PIXELS}
    file.write_text(json.dumps(processor), "utf-8")
