"""Adapters that PEFT itself makes for tiny random models, and the logits of models with them."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from mcore_qwen3vl.config import Architecture

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Kind:
    """One kind of adapter.

    Attributes:
        case: the base checkpoint, a name in `tests.converters.checkpoints.CASES`.
        config: arguments of ``LoraConfig``.
        swapped: whether experts' roles are swapped, as by some pairs of PEFT and transformers.
    """

    case: str
    config: dict[str, Any] = field(default_factory=dict)
    swapped: bool = False


KINDS = {
    "only gate_up": Kind("moe", {"target_parameters": EXPERTS[:1]}),
    "only down": Kind("moe", {"target_parameters": EXPERTS[1:]}),
    "rank patterns": Kind(
        "moe",
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ATTENTION,
            "target_parameters": EXPERTS,
            "rank_pattern": {"v_proj": 3, r"layers\.1\..*gate_up_proj": 2, "down_proj": 5},
            "alpha_pattern": {"o_proj": 7, "mlp.experts.down_proj": 9},
        },
    ),
    "swapped roles": Kind(
        "moe", {"r": 5, "target_modules": ["q_proj"], "target_parameters": EXPERTS}, swapped=True
    ),
    "router": Kind("moe", {"target_modules": ["k_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "vision": Kind(
        "dense",
        {"r": 2, "target_modules": ["attn.qkv", "attn.proj", "linear_fc1", "merger.linear_fc2"]},
    ),
    "delta nets": Kind(
        "hybrid-moe-float32",
        {
            "r": 3,
            "target_modules": [
                *ATTENTION,
                *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "up_proj"),
            ],
            "target_parameters": EXPERTS,
        },
    ),
    "modules_to_save": Kind(
        "dense",
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head", "merger"]},
    ),
    "experts saved": Kind(
        "mixed-listed",
        {"target_modules": ["gate_proj"], "modules_to_save": ["experts", "mlp.gate"]},
    ),
    "tied": Kind(
        "dense-tied",
        {
            "target_modules": ["v_proj"],
            "modules_to_save": ["lm_head"],
            "ensure_weight_tying": True,
        },
    ),
    "untied apart": Kind(
        "dense-tied", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}
    ),
    "rslora": Kind(
        "dense",
        {
            "r": 5,
            "lora_alpha": 3,
            "lora_dropout": 0.1,
            "use_rslora": True,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
            "rank_pattern": {"up_proj": 2},
        },
    ),
    "regex": Kind("dense", {"target_modules": r".*layers\.[13]\.(self_attn|mlp)\.(q|up)_proj"}),
    "all-linear": Kind("moe-v5", {"r": 2, "target_modules": "all-linear"}),
    "lm_head": Kind("dense", {"target_modules": ["lm_head", "o_proj"]}),
    "lm_head of tied": Kind("dense-tied", {"target_modules": ["lm_head"]}),
    "some layers": Kind(
        "dense-v5",
        {
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": [0, 2],
            "exclude_modules": ["layers.2.mlp.up_proj"],
        },
    ),
}


def base_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load Hugging Face's model of a checkpoint."""
    name = f"{Architecture.from_hf(path).family}ForConditionalGeneration"
    model = getattr(transformers, name)
    return model.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def make(kind: Kind, base: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save an adapter with random factors, and return the PEFT model that it was saved from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = base_model(base, dtype)
        experts = [m for m in model.modules() if type(m).__name__.endswith("TextExperts")]
        if kind.swapped:  # PEFT then reads (E, out, in) as (E, in, out)
            for module in experts:
                module.is_transposed = True
        model = get_peft_model(model, LoraConfig(**kind.config))
        for module in experts:
            module.is_transposed = False  # the model's own forward reads it too
        fill(model)
        model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def fill(model: Any) -> None:
    """Add random values to everything that trains; tied weights stay one tensor."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of an adapter's config."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def load(base: Path, folder: Path) -> Any:
    """Load PEFT's model with an adapter; a missing or unknown key is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig.from_pretrained(folder)
        model = PeftModel(base_model(base), config)
        tensors = peft.load_peft_weights(folder, device="cpu")
        result = peft.set_peft_model_state_dict(model, tensors)
    assert not result.unexpected_keys
    adapted = [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    assert not adapted
    return model.eval()


@torch.no_grad()
def logits(model: Any, architecture: Architecture) -> Tensor:
    """Return the logits, (1, 24, vocabulary), of a sequence with one image of 4 features."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 200, (1, 24), generator=generator)
    ids[0, 5] = architecture.vision_start_token_id
    ids[0, 6:10] = architecture.image_token_id
    vision = architecture.vision
    side = 2 * vision.spatial_merge_size
    return model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == architecture.image_token_id).long(),
        pixel_values=torch.randn(side**2, vision.patch_dim, generator=generator),
        image_grid_thw=torch.tensor([[1, side, side]]),
        use_cache=False,
    ).logits
