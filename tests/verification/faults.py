"""Mistakes of a wrong conversion, planted in a checkpoint's tensors or in its config."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.checkpoints import load, save

if TYPE_CHECKING:  # it imports transformers, which is slow
    from mcore_qwen3vl.verification.trace.recording import TraceReference

Tensors = dict[str, Tensor]
Config = dict[str, Any]

TEXT, VISUAL = "model.language_model", "model.visual"


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: its description.
        kind: what an audit must call it; the field of the config that it must name.
        point: probe point that a trace must name.
        inject: change of the Hugging Face tensors before conversion, experts as published.
        config: change of the config in the converted checkpoint.
        moe: whether it is made in the MoE model.
    """

    name: str
    kind: str
    point: str
    inject: Callable[[Tensors], None] | None = None
    config: Callable[[Config], None] | None = None
    moe: bool = False


def edited(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def exchanged(a: str, b: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({a: tensors[b], b: tensors[a]})


def copied(source: str, target: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({target: tensors[source].clone()})


def ungroup_qkv(tensors: Tensors) -> None:
    """Put all queries, then all keys, then all values, where mcore expects groups of them."""
    from mcore_qwen3vl.converters.mapping.rearrangement import qkv

    names = [f"{TEXT}.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    q, k, v = (tensors[n] for n in names)
    d = len(tensors[f"{TEXT}.layers.1.self_attn.q_norm.weight"])
    groups = qkv(len(q) // d, len(k) // d, d)
    for name, tensor in zip(names, groups.to_hf(torch.cat([q, k, v])), strict=True):
        tensors[name] = tensor


def decoder_layer(number: int, module: str) -> str:
    return f"{TEXT}.layers.{number}.{module}"


def weight_fault(
    name: str, kind: str, module: str, change: Callable[[Tensor], Tensor], *, moe: bool = False
) -> Fault:
    """Return a fault in a weight; the trace must name the module of the weight."""
    return Fault(name, kind, module, edited(f"{module}.weight", change), moe=moe)


def experts_fault(
    name: str, kind: str, layer: int, tensor: str, change: Callable[[Tensor], Tensor]
) -> Fault:
    experts = decoder_layer(layer, "mlp.experts")
    return Fault(name, kind, experts, edited(f"{experts}.{tensor}", change), moe=True)


MERGERS, BLOCKS = f"{VISUAL}.deepstack_merger_list", f"{VISUAL}.blocks"
Q_0, Q_1 = (decoder_layer(i, "self_attn.q_proj") for i in (0, 1))
K_2, V_2 = (decoder_layer(2, f"self_attn.{x}_proj") for x in "kv")
GATE_1, UP_1 = (decoder_layer(1, f"mlp.{x}_proj") for x in ("gate", "up"))
CONFIGS: tuple[Fault, ...] = (
    Fault(
        "rotary base 1e6 in the config", "rope_theta", f"{TEXT}.rotary_emb",
        config=lambda c: c["text_config"].update(rope_theta=1000000),
    ),
    Fault(
        "mrope_section [6, 3, 3]", "mrope_section", f"{TEXT}.rotary_emb",
        config=lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[6, 3, 3]),
    ),
    Fault(
        "rms_norm_eps 1e-5", "rms_norm_eps", decoder_layer(0, "input_layernorm"),
        config=lambda c: c["text_config"].update(rms_norm_eps=1e-5),
    ),
    Fault(
        "DeepStack from blocks 0, 2, 3", "vision.deepstack_visual_indexes", f"{MERGERS}.0",
        config=lambda c: c["vision_config"].update(deepstack_visual_indexes=[0, 2, 3]),
    ),
    Fault(
        "top-2 router", "num_experts_per_tok", decoder_layer(0, "mlp.gate"),
        config=lambda c: c["text_config"].update(num_experts_per_tok=2), moe=True,
    ),
)  # fmt: skip
WEIGHTS: tuple[Fault, ...] = (
    Fault("QKV not grouped", "permuted QKV", Q_1, ungroup_qkv),
    Fault(
        "keys and values swapped", "permuted QKV", K_2,
        exchanged(f"{K_2}.weight", f"{V_2}.weight"),
    ),
    weight_fault(
        "rotary halves interleaved in the query", "permuted QKV", Q_0,
        lambda w: w.unflatten(0, (-1, 2, 12)).transpose(1, 2).reshape(w.shape),
    ),
    Fault(
        "gate and up swapped", "swapped gate and up", GATE_1,
        exchanged(f"{GATE_1}.weight", f"{UP_1}.weight"),
    ),
    experts_fault(
        "gate and up of all experts swapped", "swapped gate and up", 2, "gate_up_proj",
        lambda w: w.roll(w.shape[2] // 2, 2),
    ),
    experts_fault(
        "experts' down projection transposed", "transposed expert", 1, "down_proj",
        lambda w: w.transpose(1, 2).reshape(w.shape),
    ),
    experts_fault(
        "two experts exchanged", "expert order", 0, "gate_up_proj",
        lambda w: w[[0, 5, 2, 3, 4, 1, *range(6, len(w))]],
    ),
    weight_fault(
        "router rows in reverse order", "router order", decoder_layer(3, "mlp.gate"),
        lambda w: w.flip(0), moe=True,
    ),
    weight_fault(
        "attention output rounded to bfloat16", "dtype", decoder_layer(2, "self_attn.o_proj"),
        lambda w: w.bfloat16().float(),
    ),
    weight_fault(
        "norm weight stored as w - 1", "zero-centred norm",
        decoder_layer(1, "post_attention_layernorm"), lambda w: w - 1,
    ),
    Fault(
        "head is the embedding", "tied head", "lm_head",
        copied(f"{TEXT}.embed_tokens.weight", "lm_head.weight"),
    ),
    Fault(
        "DeepStack merger never filled", "missing DeepStack", f"{MERGERS}.1",
        edited(f"{MERGERS}.1.linear_fc2.weight", torch.zeros_like),
    ),
    Fault(
        "a vision block holds another's weights", "wrong vision weights", f"{BLOCKS}.2.attn",
        copied(f"{BLOCKS}.3.attn.proj.weight", f"{BLOCKS}.2.attn.proj.weight"),
    ),
    Fault(
        "colour channels reversed in the patch embedding", "patch order", f"{VISUAL}.patch_embed",
        edited(f"{VISUAL}.patch_embed.proj.weight", lambda w: w.flip(1)),
    ),
    weight_fault(
        "vision QKV grouped by heads", "permuted vision QKV", f"{BLOCKS}.1.attn.qkv",
        lambda w: w.unflatten(0, (3, 4, 8)).transpose(0, 1).reshape(w.shape),
    ),
)  # fmt: skip


class FaultInjector:
    """A maker of correct checkpoints, and of converted ones with a fault, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[bool, TraceReference] = {}

    def reference(self, *, moe: bool) -> TraceReference:
        """Return the correct checkpoint in the form that the trace takes."""
        from mcore_qwen3vl.verification.trace.recording import TraceReference

        if moe not in self._references:
            self._references[moe] = TraceReference(self.correct(moe=moe))
        return self._references[moe]

    def correct(self, *, moe: bool) -> Path:
        path = self.folder / ("moe" if moe else "dense")
        if not path.exists():
            write_tiny_checkpoint(path, moe=moe, seed=5)
        return path

    def with_fault(self, fault: Fault) -> Path:
        """Convert the correct checkpoint to Megatron-Core's format with the fault in it."""
        target = self.folder / fault.name.replace(" ", "-")
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            source = Path(shutil.copytree(self.correct(moe=fault.moe), Path(scratch) / "hf"))
            if fault.inject is not None:
                tensors = load(source)
                fault.inject(tensors)
                save(tensors, source)
            hf_to_mcore(source, target)
        if fault.config is not None:
            config = target / "hf" / "config.json"
            content = json.loads(config.read_text("utf-8"))
            fault.config(content)
            config.write_text(json.dumps(content), "utf-8")
        return target
