"""Adapters for comparisons: named ones for the tiny models, and random values for any config."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.files import write_adapter
from mcore_qwen3vl.converters.adapters.peft_model import HEAD, HFConfig, apply
from mcore_qwen3vl.converters.adapters.targets import preset, resolve_targets
from mcore_qwen3vl.converters.storage.boxes import Shape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
VISION = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")  # the last two: mergers too

ADAPTERS: dict[str, AdapterConfig] = {
    "language": AdapterConfig(r=4, lora_alpha=10, target_modules=(*ATTENTION, *MLP)),
    "mixed ranks": AdapterConfig(
        r=4,
        lora_alpha=10,
        target_modules=(*ATTENTION, *MLP),
        rank_pattern={"v_proj": 3, "up_proj": 5, r"layers\.2\.self_attn\.q_proj": 7},
        alpha_pattern={"up_proj": 6},
    ),
    "q and v": AdapterConfig(
        r=5, lora_alpha=7, use_rslora=True, target_modules=("q_proj", "v_proj")
    ),
    "k and gate": AdapterConfig(
        r=3, lora_alpha=4, target_modules=("k_proj", "gate_proj"), layers_to_transform=(0, 3)
    ),
    "everything": AdapterConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=(*ATTENTION, *MLP, *VISION, "lm_head"),
        rank_pattern={"lm_head": 6, "attn.qkv": 3},
    ),
    "whole": AdapterConfig(
        r=4,
        lora_alpha=5,
        target_modules=ATTENTION,
        modules_to_save=("embed_tokens", "lm_head", "merger"),
    ),
    "whole tied": AdapterConfig(
        r=4,
        lora_alpha=5,
        target_modules=ATTENTION,
        modules_to_save=("embed_tokens",),
        ensure_weight_tying=True,
    ),
    "whole vision": AdapterConfig(
        r=4, lora_alpha=5, target_modules=("down_proj",), modules_to_save=("visual",)
    ),
    "experts": AdapterConfig(
        r=4,
        lora_alpha=10,
        target_modules=ATTENTION,
        target_parameters=EXPERTS,
        rank_pattern={"v_proj": 3, "experts.down_proj": 2},
    ),
    "gate and up of experts": AdapterConfig(
        r=3, lora_alpha=4, target_parameters=("mlp.experts.gate_up_proj",)
    ),
    "down of experts": AdapterConfig(
        r=3, lora_alpha=4, use_rslora=True, target_parameters=("mlp.experts.down_proj",)
    ),
    "router": AdapterConfig(
        r=3,
        lora_alpha=4,
        target_modules=("o_proj", "attn.qkv", "merger.linear_fc1", "lm_head"),
        target_parameters=("mlp.gate.weight", *EXPERTS),
    ),
    "whole router": AdapterConfig(
        r=3, lora_alpha=4, target_modules=("o_proj",), modules_to_save=("gate", "merger")
    ),
    "experts and MLP": AdapterConfig(
        r=4,
        lora_alpha=6,
        target_modules=(*ATTENTION, *MLP),
        target_parameters=EXPERTS,
    ),
}
"""The matrix's adapters, with targets, ranks, scalings and whole tensors; all values are random."""


def preset_config(name: str, hf_dir: str | Path) -> AdapterConfig:
    """Return a config for one of the usual choices of targets, see ``targets.preset``."""
    modules, parameters = preset(name, Architecture.from_hf(hf_dir))
    return AdapterConfig(r=8, lora_alpha=16, target_modules=modules, target_parameters=parameters)


def write_random_adapter(path: Path, config: AdapterConfig, hf_config: HFConfig) -> Path:
    """Write a PEFT adapter with random factors and random whole tensors.

    Args:
        path: the directory to write.
        config: the adapter's config.
        hf_config: the model's ``config.json``: its content, the file or its directory.

    Returns:
        `path`.
    """
    factors = {
        name: Factors(
            _random(f"{name}.a", spec.a_shape, 1.0),
            _random(f"{name}.b", spec.b_shape, 0.3),
            spec.r,
            spec.scaling,
        )
        for name, spec in resolve_targets(config, hf_config).items()
    }
    saved = {
        name: _random(name, shape, 1.0) for name, shape in apply(config, hf_config).saved.items()
    }
    if config.ensure_weight_tying:
        saved.pop(HEAD, None)  # the embedding's tensor stands for both
    write_adapter(path, config, factors, saved, hf_config)
    return path


def _random(name: str, shape: Shape, gain: float) -> Tensor:
    """Return a matrix of gain `gain`, or a vector (of a norm or bias) around one half."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    return 0.5 + 0.2 * noise if len(shape) == 1 else gain * noise / noise[0].numel() ** 0.5
