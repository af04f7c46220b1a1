"""Adapters for comparisons: named ones for the tiny models, and random values for any config."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Factors, write_adapter
from mcore_qwen3vl.converters.adapters.config import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MLP,
    ROUTER,
    AdapterConfig,
    HFConfig,
    apply,
    preset,
    resolve_targets,
)
from mcore_qwen3vl.converters.mapping.forms import LM_HEAD
from mcore_qwen3vl.converters.storage.boxes import Shape

VISION = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")  # the last two: mergers too


def _lora(r: int, alpha: int, *modules: str, **more: Any) -> AdapterConfig:
    return AdapterConfig(r=r, lora_alpha=alpha, target_modules=modules or None, **more)


ADAPTERS: dict[str, AdapterConfig] = {
    "language": _lora(4, 10, *ATTENTION, *MLP),
    "mixed ranks": _lora(
        *(4, 10, *ATTENTION, *MLP),
        rank_pattern={"v_proj": 3, "up_proj": 5, r"layers\.2\.self_attn\.q_proj": 7},
        alpha_pattern={"up_proj": 6},
    ),
    "q and v": _lora(5, 7, "q_proj", "v_proj", use_rslora=True),
    "k and gate": _lora(3, 4, "k_proj", "gate_proj", layers_to_transform=(0, 3)),
    "everything": _lora(
        *(4, 6, *ATTENTION, *MLP, *VISION, "lm_head"),
        use_rslora=True,
        rank_pattern={"lm_head": 6, "attn.qkv": 3},
    ),
    "whole": _lora(4, 5, *ATTENTION, modules_to_save=("embed_tokens", "lm_head", "merger")),
    "whole tied": _lora(
        4, 5, *ATTENTION, modules_to_save=("embed_tokens",), ensure_weight_tying=True
    ),
    "whole vision": _lora(4, 5, "down_proj", modules_to_save=("visual",)),
    "experts": _lora(
        *(4, 10, *ATTENTION),
        target_parameters=EXPERTS,
        rank_pattern={"v_proj": 3, "experts.down_proj": 2},
    ),
    "gate and up of experts": _lora(3, 4, target_parameters=EXPERTS[:1]),
    "down of experts": _lora(3, 4, use_rslora=True, target_parameters=EXPERTS[1:]),
    "router": _lora(
        *(3, 4, "o_proj", "attn.qkv", "merger.linear_fc1", "lm_head"),
        target_parameters=(ROUTER, *EXPERTS),
    ),
    "whole router": _lora(3, 4, "o_proj", modules_to_save=("gate", "merger")),
    "experts and MLP": _lora(4, 6, *ATTENTION, *MLP, target_parameters=EXPERTS),
    "hybrid": _lora(
        *(4, 10, *ATTENTION, *DELTA_NET, *MLP), rank_pattern={"in_proj_qkv": 3, "in_proj_a": 2}
    ),
    "hybrid experts": _lora(3, 4, *ATTENTION, *DELTA_NET, *MLP, target_parameters=EXPERTS),
}
"""The matrix's adapters, with targets, ranks, scalings and whole tensors; all values are random."""


def preset_config(name: str, hf_dir: str | Path) -> AdapterConfig:
    """Return a config for one of the usual choices of targets, see ``adapters.config.preset``."""
    modules, parameters = preset(name, Architecture.from_hf(hf_dir))
    return AdapterConfig(r=8, lora_alpha=16, target_modules=modules, target_parameters=parameters)


def write_random_adapter(path: Path, config: AdapterConfig, hf_config: HFConfig) -> Path:
    """Write a PEFT adapter with random factors and random whole tensors, and return its path."""
    factors = {
        name: Factors(
            _random_tensor(f"{name}.a", spec.a_shape, 1.0),
            _random_tensor(f"{name}.b", spec.b_shape, 0.3),
            spec.r,
            spec.scaling,
        )
        for name, spec in resolve_targets(config, hf_config).items()
    }
    saved = {
        name: _random_tensor(name, shape, 1.0)
        for name, shape in apply(config, hf_config).saved.items()
    }
    if config.ensure_weight_tying:
        saved.pop(LM_HEAD, None)  # the embedding's tensor stands for both
    write_adapter(path, config, factors, saved, hf_config)
    return path


def _random_tensor(name: str, shape: Shape, gain: float) -> Tensor:
    """Return a matrix of gain `gain`, or a vector (of a norm or bias) around one half."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    return 0.5 + 0.2 * noise if len(shape) == 1 else gain * noise / noise[0].numel() ** 0.5
