"""The tensors that each rank of a layout must hold, computed from HF's by parameter name.

The table is not used, so that an error in it cannot hide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from tests.converters.checkpoints import load

HEADS, GROUPS, HEAD_DIM, EXPERTS = 8, 4, 24, 12


def build_chunks(layout: Layout, architecture: Architecture, **overrides: Any) -> list[Any]:
    """Build this rank's pipeline chunks, full of NaN, so that unloaded parameters show."""
    from megatron.core import parallel_state as mpu

    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

    chunks = []
    for stage in range(layout.vpp) if layout.vpp > 1 else [None]:
        chunk = Qwen3VLModel.from_hf_config(
            architecture,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
            **layout.config_overrides(),
            **overrides,
        )
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
        chunks.append(chunk)
    return chunks


def check_chunks(chunks: list[Any], source: Path) -> int:
    """Compare every parameter with the HF checkpoint `source`, and return their number."""
    hf = load(source)
    published = Architecture.from_hf(source).expert_layout == "published"
    compared = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer = -1
            if name.startswith("decoder.layers."):
                layer = chunk.decoder.layers[int(name.split(".")[2])].layer_number - 1
            want = expected(name, layer, hf, published)
            assert parameter.dtype == want.dtype, name
            assert torch.equal(parameter.detach(), want), f"{name} of layer {layer}"
            compared += 1
    return compared


def expected(name: str, layer: int, hf: dict[str, Tensor], published: bool) -> Tensor:
    """Return what the parameter `name` of global layer `layer` must hold on this rank."""
    from megatron.core import parallel_state as mpu

    tp, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    text = "model.language_model."
    at = f"{text}layers.{layer}."

    def cut(tensor: Tensor, axis: int) -> Tensor:
        return tensor.chunk(tp, axis)[tp_rank]

    if name.startswith("visual."):
        name = name.replace("visual.model.", "visual.")
        return hf[f"model.{name}"]
    if name == "embedding.word_embeddings.weight":
        return cut(hf[f"{text}embed_tokens.weight"], 0)
    if name == "output_layer.weight":
        return cut(hf.get("lm_head.weight", hf[f"{text}embed_tokens.weight"]), 0)
    if name == "decoder.final_layernorm.weight":
        return hf[f"{text}norm.weight"]
    part = name.split(".", 3)[3]
    if ".experts." in name:
        local = EXPERTS // mpu.get_expert_model_parallel_world_size()
        first = local * mpu.get_expert_model_parallel_rank()
        experts = range(first, first + local)
        return torch.stack([expected_expert(part, at, e, hf, published) for e in experts])
    match part:
        case "self_attention.linear_qkv.weight":
            return expected_qkv(at, hf, tp, tp_rank)
        case "self_attention.linear_proj.weight":
            return cut(hf[f"{at}self_attn.o_proj.weight"], 1)
        case "mlp.linear_fc1.weight":
            gate, up = (hf[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up"))
            return torch.cat([cut(gate, 0), cut(up, 0)])
        case "mlp.linear_fc2.weight":
            return cut(hf[f"{at}mlp.down_proj.weight"], 1)
    whole = {
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    return hf[at + whole[part]]


def expected_qkv(at: str, hf: dict[str, Tensor], tp: int, tp_rank: int) -> Tensor:
    """Return this rank's KV groups one after another, each with its query heads, key and value."""
    q, k, v = (hf[f"{at}self_attn.{n}_proj.weight"] for n in "qkv")
    rows = []
    for group in range(GROUPS // tp * tp_rank, GROUPS // tp * (tp_rank + 1)):
        for head in range(HEADS // GROUPS * group, HEADS // GROUPS * (group + 1)):
            rows.append(q[head * HEAD_DIM : (head + 1) * HEAD_DIM])
        rows.append(k[group * HEAD_DIM : (group + 1) * HEAD_DIM])
        rows.append(v[group * HEAD_DIM : (group + 1) * HEAD_DIM])
    return torch.cat(rows)


def expected_expert(
    part: str, at: str, expert: int, hf: dict[str, Tensor], published: bool
) -> Tensor:
    from megatron.core import parallel_state as mpu

    etp = mpu.get_expert_tensor_parallel_world_size()
    etp_rank = mpu.get_expert_tensor_parallel_rank()
    if "linear_fc1" in part:
        gate_up = hf[f"{at}mlp.experts.gate_up_proj"][expert]
        gate, up = (gate_up.T if published else gate_up).chunk(2)
        return torch.cat([gate.chunk(etp)[etp_rank], up.chunk(etp)[etp_rank]])
    down = hf[f"{at}mlp.experts.down_proj"][expert]
    return (down.T if published else down).chunk(etp, 1)[etp_rank]
