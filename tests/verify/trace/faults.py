"""The faults that a trace must find, each with what is changed and what the trace must say.

A fault changes the weights of a checkpoint or its config, as a wrong conversion would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.probe_points import TEXT, VISUAL

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: description of the fault.
        kind: name that the trace must give it (``Cause.kind``).
        point: probe point that the trace must name.
        inject: change of the Hugging Face tensors before conversion, experts as published.
        config: change of the config in the converted checkpoint.
        moe: whether the fault is in the MoE model.
    """

    name: str
    kind: str
    point: str
    inject: Callable[[Tensors], None] | None = None
    config: Callable[[dict[str, Any]], None] | None = None
    moe: bool = False


def _edit(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def inject(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return inject


def _swap(a: str, b: str) -> Callable[[Tensors], None]:
    def inject(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return inject


def _set(section: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[section].update(values)


def _ungrouped_qkv(tensors: Tensors) -> None:
    """Put all queries, then all keys, then all values, where mcore expects groups of them."""
    from mcore_qwen3vl.converters.mapping.transforms import qkv

    names = [f"{TEXT}.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    q, k, v = (tensors[n] for n in names)
    d = len(tensors[f"{TEXT}.layers.1.self_attn.q_norm.weight"])
    groups = qkv(len(q) // d, len(k) // d, d)
    for name, tensor in zip(names, groups.to_hf(torch.cat([q, k, v])), strict=True):
        tensors[name] = tensor


def _rotary_pairs(weight: Tensor) -> Tensor:
    heads = weight.unflatten(0, (-1, 2, 12))
    return heads.transpose(1, 2).reshape(weight.shape)


def _layer(number: int, name: str) -> str:
    return f"{TEXT}.layers.{number}.{name}"


FAULTS: tuple[Fault, ...] = (
    Fault(
        "rotary base 1e6 in the config",
        "rotary base",
        f"{TEXT}.rotary_emb",
        config=_set("text_config", rope_theta=1000000),
    ),
    Fault(
        "mrope_section [6, 3, 3]",
        "mrope section",
        f"{TEXT}.rotary_emb",
        config=lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[6, 3, 3]),
    ),
    Fault(
        "rms_norm_eps 1e-5",
        "norm epsilon",
        _layer(0, "input_layernorm"),
        config=_set("text_config", rms_norm_eps=1e-5),
    ),
    Fault(
        "DeepStack from blocks 0, 2, 3",
        "DeepStack layer",
        f"{VISUAL}.deepstack_merger_list.0",
        config=_set("vision_config", deepstack_visual_indexes=[0, 2, 3]),
    ),
    Fault(
        "top-2 router",
        "router top-k",
        _layer(0, "mlp.gate"),
        config=_set("text_config", num_experts_per_tok=2),
        moe=True,
    ),
    Fault("QKV not grouped", "permuted QKV", _layer(1, "self_attn.q_proj"), inject=_ungrouped_qkv),
    Fault(
        "keys and values swapped",
        "permuted QKV",
        _layer(2, "self_attn.k_proj"),
        inject=_swap(_layer(2, "self_attn.k_proj.weight"), _layer(2, "self_attn.v_proj.weight")),
    ),
    Fault(
        "rotary halves interleaved in the query",
        "permuted QKV",
        _layer(0, "self_attn.q_proj"),
        inject=_edit(_layer(0, "self_attn.q_proj.weight"), _rotary_pairs),
    ),
    Fault(
        "gate and up swapped",
        "swapped gate and up",
        _layer(1, "mlp.gate_proj"),
        inject=_swap(_layer(1, "mlp.gate_proj.weight"), _layer(1, "mlp.up_proj.weight")),
    ),
    Fault(
        "gate and up of all experts swapped",
        "swapped gate and up",
        _layer(2, "mlp.experts"),
        inject=_edit(_layer(2, "mlp.experts.gate_up_proj"), lambda w: w.roll(w.shape[2] // 2, 2)),
        moe=True,
    ),
    Fault(
        "experts' down projection transposed",
        "transposed expert",
        _layer(1, "mlp.experts"),
        inject=_edit(
            _layer(1, "mlp.experts.down_proj"),
            lambda w: w.transpose(1, 2).reshape(w.shape),
        ),
        moe=True,
    ),
    Fault(
        "two experts exchanged",
        "expert order",
        _layer(0, "mlp.experts"),
        inject=_edit(
            _layer(0, "mlp.experts.gate_up_proj"),
            lambda w: w[[0, 5, 2, 3, 4, 1, *range(6, len(w))]],
        ),
        moe=True,
    ),
    Fault(
        "router rows in reverse order",
        "router order",
        _layer(3, "mlp.gate"),
        inject=_edit(_layer(3, "mlp.gate.weight"), lambda w: w.flip(0)),
        moe=True,
    ),
    Fault(
        "attention output rounded to bfloat16",
        "dtype",
        _layer(2, "self_attn.o_proj"),
        inject=_edit(_layer(2, "self_attn.o_proj.weight"), lambda w: w.bfloat16().float()),
    ),
    Fault(
        "norm weight stored as w - 1",
        "zero-centred norm",
        _layer(1, "post_attention_layernorm"),
        inject=_edit(_layer(1, "post_attention_layernorm.weight"), lambda w: w - 1),
    ),
    Fault(
        "head is the embedding",
        "tied head",
        "lm_head",
        inject=lambda t: t.update({"lm_head.weight": t[f"{TEXT}.embed_tokens.weight"].clone()}),
    ),
    Fault(
        "DeepStack merger never filled",
        "missing DeepStack",
        f"{VISUAL}.deepstack_merger_list.1",
        inject=_edit(f"{VISUAL}.deepstack_merger_list.1.linear_fc2.weight", torch.zeros_like),
    ),
    Fault(
        "a vision block holds another's weights",
        "wrong vision weights",
        f"{VISUAL}.blocks.2.attn",
        inject=lambda t: t.update(
            {
                f"{VISUAL}.blocks.2.attn.proj.weight": t[
                    f"{VISUAL}.blocks.3.attn.proj.weight"
                ].clone()
            }
        ),
    ),
    Fault(
        "colour channels reversed in the patch embedding",
        "patch order",
        f"{VISUAL}.patch_embed",
        inject=_edit(f"{VISUAL}.patch_embed.proj.weight", lambda w: w.flip(1)),
    ),
    Fault(
        "vision QKV grouped by heads",
        "permuted vision QKV",
        f"{VISUAL}.blocks.1.attn.qkv",
        inject=_edit(
            f"{VISUAL}.blocks.1.attn.qkv.weight",
            lambda w: w.unflatten(0, (3, 4, 8)).transpose(0, 1).reshape(w.shape),
        ),
    ),
)
