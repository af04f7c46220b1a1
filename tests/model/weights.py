"""HF tensors as one rank's parameters, deliberately without the conversion table."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

TEXT = "model.language_model."
PLAIN = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def local(model: Qwen3VLModel, name: str, hf: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the whole tensor behind parameter `name`, built from HF's, and this rank's part."""
    whole = _whole(model, name, hf)
    if name.startswith("visual."):
        return whole, whole
    if ".experts." in name:
        return whole, _of_expert_rank(name, whole)
    size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if "linear_fc1" in name:  # (2, ffn, H)
        return whole, whole.chunk(size, 1)[rank].flatten(0, 1)
    if "linear_fc2" in name or "linear_proj" in name:
        return whole, whole.chunk(size, 1)[rank]
    if any(n in name for n in ("linear_qkv", "word_embeddings", "output_layer")):
        return whole, whole.chunk(size, 0)[rank]
    return whole, whole


def _whole(model: Qwen3VLModel, name: str, hf: dict[str, Tensor]) -> Tensor:
    a = model.architecture
    ends = {
        "embedding.word_embeddings.weight": f"{TEXT}embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": f"{TEXT}norm.weight",
        "decoder.final_norm.weight": f"{TEXT}norm.weight",  # of a HybridModel
    }
    if name.startswith("visual."):
        return hf[f"model.{name}"]
    if name in ends:
        return hf.get(ends[name], hf[ends["embedding.word_embeddings.weight"]])
    _, _, index, rest = name.split(".", 3)
    module: Any = model.decoder.layers[int(index)]
    layer = f"{TEXT}layers.{getattr(module, 'hf_layer', module.layer_number - 1)}."
    if rest in PLAIN:
        return hf[layer + PLAIN[rest]]
    if rest == "self_attention.linear_qkv.weight":
        return _qkv(a, *(hf[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"))
    if rest == "mlp.linear_fc1.weight":
        return torch.stack([hf[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    held = a.num_experts // ps.get_expert_model_parallel_world_size()
    first = held * ps.get_expert_model_parallel_rank()
    if rest == "mlp.experts.linear_fc1.weight":  # (E, 2, ffn, H)
        return hf[f"{layer}mlp.experts.gate_up_proj"][first : first + held].unflatten(1, (2, -1))
    return hf[f"{layer}mlp.experts.down_proj"][first : first + held]


def _of_expert_rank(name: str, whole: Tensor) -> Tensor:
    size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    part = whole.chunk(size, 2)[rank]
    return part.flatten(1, 2) if "linear_fc1" in name else part


def _qkv(a: Architecture, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Interleave by group: its queries, its key, its value."""
    groups = a.num_key_value_heads
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


@torch.no_grad()
def load(model: Qwen3VLModel, hf: dict[str, Tensor]) -> None:
    parameter: nn.Parameter
    for name, parameter in model.named_parameters():
        _, part = local(model, name, hf)
        assert part.shape == parameter.shape, (name, part.shape, parameter.shape)
        parameter.copy_(part)
