"""The data path: the probe points where the two models are compared, in the order of the data.

A probe point is the output (or the input) of one Hugging Face module, and has that module's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture

Rows = Literal["tokens", "patches", "features"]
"""What the rows at a probe point stand for: tokens (B, S), patches (P), merged features (N)."""

VISUAL = "model.visual"
TEXT = "model.language_model"

ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
GRADIENTS = "gradients"
WEIGHTS = "weights"
"""The parts of a trace."""


@dataclass(frozen=True)
class ProbePoint:
    """One probe point on the data path.

    Attributes:
        name: HF module name, with ``:input`` for the input of a module whose output is one too.
        rows: what its rows stand for.
        module: HF module with the hook.
        side: whether the module's input or output is compared.
        pick: returns the tensor to compare from that input or output; its gradient is compared too.
        spread: brings that tensor, or its gradient, into the compared form, given the whole output.
    """

    name: str
    rows: Rows
    module: str
    side: Literal["input", "output"] = "output"
    pick: Callable[[Any], Tensor] = lambda value: value
    spread: Callable[[Tensor, Any], Tensor] = lambda tensor, value: tensor


def data_path(a: Architecture) -> list[ProbePoint]:
    """Return all probe points of a model, in the order of the data."""
    return [*_vision(a), *_text(a)]


def cosine_and_sine(tables: tuple[Tensor, Tensor]) -> Tensor:
    """Join rotary tables into one tensor: (..., D) twice to (..., 2 * D)."""
    return torch.cat(tables, dim=-1)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states that a module was called with."""
    return args[0] if args else kwargs["hidden_states"]


def _vision(a: Architecture) -> Iterator[ProbePoint]:
    def visual(name: str, rows: Rows = "patches", **kwargs: Any) -> ProbePoint:
        return ProbePoint(f"{VISUAL}.{name}", rows, f"{VISUAL}.{name}", **kwargs)

    yield visual("patch_embed")
    yield visual("pos_embed")
    yield visual("rotary_pos_emb", pick=cosine_and_sine)
    deepstack = a.vision.deepstack_visual_indexes
    for i in range(a.vision.depth):
        for child in ("norm1", "attn.qkv", "attn", "norm2", "mlp"):
            yield visual(f"blocks.{i}.{child}")
        yield visual(f"blocks.{i}")
        if i in deepstack:
            yield visual(f"deepstack_merger_list.{deepstack.index(i)}", "features")
    yield visual("merger", "features")


def _text(a: Architecture) -> Iterator[ProbePoint]:
    def tokens(name: str, module: str = "", **kwargs: Any) -> ProbePoint:
        return ProbePoint(name, "tokens", module or name, **kwargs)

    yield tokens(f"{TEXT}.embed_tokens")
    yield tokens(f"{TEXT}.inputs_embeds", module=f"{TEXT}.layers.0", side="input")
    yield tokens(f"{TEXT}.rotary_emb", pick=cosine_and_sine)
    for i in range(a.num_hidden_layers):
        layer = f"{TEXT}.layers.{i}"
        yield tokens(f"{layer}.input_layernorm")
        for child in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
            yield tokens(f"{layer}.self_attn.{child}")
        projection = f"{layer}.self_attn.o_proj"
        yield tokens(f"{projection}:input", module=projection, side="input")
        yield tokens(projection)
        yield tokens(f"{layer}.post_attention_layernorm")
        if a.moe_layers[i]:
            yield tokens(f"{layer}.mlp.gate", pick=lambda out: out[1], spread=_over_all_experts)
            yield tokens(f"{layer}.mlp.experts")
        else:
            for child in ("gate_proj", "up_proj", "down_proj"):
                yield tokens(f"{layer}.mlp.{child}")
        # DeepStack features are added between one layer and the next.
        last = i == a.num_hidden_layers - 1
        follows = f"{TEXT}.norm" if last else f"{TEXT}.layers.{i + 1}"
        yield tokens(layer, module=follows, side="input")
    yield tokens(f"{TEXT}.norm")
    yield tokens("lm_head")


def _over_all_experts(scores: Tensor, outputs: Any) -> Tensor:
    """Scatter the weights of the chosen experts (T, k) to (T, E), zero for the others."""
    logits, _, chosen = outputs
    return torch.zeros_like(logits, dtype=scores.dtype).scatter(1, chosen, scores)
