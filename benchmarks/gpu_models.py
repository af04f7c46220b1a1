"""What :mod:`benchmarks.gpu_check` compares and measures: tiny models, and published sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kernels take the published head sizes of 128 and 72, rows of whole 16 bytes and, in FP8, blocks of
# 128. With other sizes a model is computed in other ways than those that train.
WIDE: dict[str, Any] = {
    "text": {
        "head_dim": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
    },
    "vision": {"hidden_size": 144, "intermediate_size": 256, "num_heads": 2},
}
# Nor may an expert's matrix be square: Hugging Face transposes what it loads by the shape alone.
WIDE_MOE = {"moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2}
# Those of Qwen3.5, whose attention has heads of 256, and its delta nets of 128.
HYBRID: dict[str, Any] = {"family": "qwen3.5"}
WIDE_HYBRID: dict[str, Any] = {
    **HYBRID,
    "text": {
        "head_dim": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "vision": WIDE["vision"],
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"moe": True},
    "hybrid": HYBRID,
    "hybrid-moe": {**HYBRID, "moe": True},
    "wide": WIDE,
    "wide-moe": {**WIDE, "moe": True, "text": {**WIDE["text"], **WIDE_MOE}},
    # bf16 cannot judge tokens that rounding sends to other experts; with all experts it can.
    "wide-moe-all": {
        **WIDE, "moe": True, "text": {**WIDE["text"], **WIDE_MOE, "num_experts_per_tok": 8},
    },
    "wide-hybrid": WIDE_HYBRID,
    "wide-hybrid-moe-all": {
        **WIDE_HYBRID,
        "moe": True,
        "text": {
            **WIDE_HYBRID["text"], **WIDE_MOE, "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 128,
        },
    },
}  # fmt: skip
"""The arguments of :func:`write_tiny_checkpoint` for each model."""

FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"  # as FP8=1 for the scripts
MOE = "--moe-z-loss-coeff 1e-5"


@dataclass(frozen=True)
class Size:
    """A model to measure."""

    name: str
    shape: str
    layers: int | None = None  # of each tower in a step, of the decoder in a run
    gib: float = 0.0  # what it takes of a GPU
    flags: str = ""

    @property
    def folder_name(self) -> str:
        """The name of its folder, from which :func:`write_stand_ins` takes shape and layers."""
        return f"{self.shape}_{self.layers}" if self.layers else self.shape


STEPS = (
    Size("2B", "2B", None, 60),
    Size("30B-A3B with 4 layers", "30B-A3B", 4, 70),
    Size("8B with 8 layers", "8B", 8, 67),
    Size("Qwen3.5-9B with 4 layers", "Qwen3.5-9B", 4, 70),
)
RUNS = (
    Size("2B", "2B", None, 62),
    Size("2B, FP8", "2B", None, 66, FP8),
    Size("30B-A3B with 3 layers", "30B-A3B", 3, 76, MOE),
    Size("8B, LoRA", "8B", None, 47, "--lora-rank 16 --lora-target language"),
    Size("Qwen3.5-0.8B", "Qwen3.5-0.8B", None, 40),
    Size("Qwen3.5-9B, LoRA", "Qwen3.5-9B", None, 70, "--lora-rank 16 --lora-target language"),
)
PROFILES = tuple(size for size in RUNS if size.name in ("2B", "Qwen3.5-9B, LoRA"))


def write_stand_ins(folder: str, *names: str) -> None:
    """Write a model directory and data for each name: a shape, or a shape and its layers."""
    from mcore_qwen3vl.published_configs import PUBLISHED
    from mcore_qwen3vl.tiny import tiny_config
    from mcore_qwen3vl.tiny.records import write_half_images
    from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in

    for name in names:
        out = Path(folder, name)
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted run left
        out.mkdir(parents=True)
        shape, _, layers = name.partition("_")
        tokens, side, pixels = (128, 6, 8) if shape == "tiny" else (512, 16, 32)
        config = PUBLISHED / f"{shape.lower().replace('-', '_')}.json"
        if shape == "tiny":
            config = out / "tiny.json"
            config.write_text(json.dumps(tiny_config()))
        write_stand_in(config, out / "model", layers=int(layers) if layers else None)
        write_half_images(out / "data", tokens=tokens, image_side=side, token_pixels=pixels)


def write_tiny_models(folder: str) -> None:
    """Write the models of :data:`MODELS`, and records to train on."""
    from mcore_qwen3vl.tiny import write_tiny_checkpoint
    from mcore_qwen3vl.tiny.records import write_half_images

    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
    for name, sizes in MODELS.items():
        write_tiny_checkpoint(Path(folder, name), **sizes)
    write_half_images(Path(folder, "data"), tokens=128, image_side=6, token_pixels=8)
