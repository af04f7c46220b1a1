"""The settings of the run that wrote a checkpoint, compared with the Hugging Face config.

The tensors of a checkpoint may be right and its settings wrong: then a run that takes them, or that
was started with them, trains another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.place import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.megatron_config import architecture_facts
from mcore_qwen3vl.verify.measurement import Finding

SETTINGS = "settings"
"""The part of the report."""

COMPUTES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "mrope_section", "swiglu"),
    *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
)
"""Megatron's arguments that decide what the model computes, whoever builds it."""

OLDER = {"layernorm_epsilon": "norm_epsilon"}
"""Names that arguments had in older versions of Megatron."""

NO_COMPUTATION = (
    *("dtype", "expert_layout", "initializer_range", "max_position_embeddings"),
    "router_aux_loss_coef",
)
"""Fields of a Hugging Face config that do not change what the model computes."""


def compare_settings(
    examined: Path, stored: MegatronCheckpoint | HuggingFaceCheckpoint, right: Architecture
) -> Iterator[Finding]:
    """Compare what a checkpoint says of its model with the right config.

    It may say so in a Hugging Face config of its own, in Megatron's arguments, or in
    Megatron-Bridge's ``run_config.yaml``. What it does not say is not compared.

    Args:
        examined: the checkpoint's directory.
        stored: the checkpoint.

    Raises:
        BadInput: a file is damaged.
    """
    yield from _own_config(examined, right)
    saved = saved_settings(stored) if isinstance(stored, MegatronCheckpoint) else {}
    for fact in architecture_facts(right):
        name = fact.argument or ""
        there = [n for n in (name, fact.field or "", OLDER.get(name, "")) if n in saved]
        if name in COMPUTES and there:
            yield _compared(name, saved[there[0]], fact.value)


def _own_config(examined: Path, right: Architecture) -> Iterator[Finding]:
    if (folder := identify(examined).hf) is None:
        return
    own, wanted = _flat(Architecture.from_hf(folder)), _flat(right)
    yield from (_compared(name, own[name], wanted[name]) for name in wanted)


def _flat(architecture: Architecture) -> dict[str, Any]:
    values = asdict(architecture)
    vision = {f"vision.{name}": value for name, value in values.pop("vision").items()}
    return {name: value for name, value in values.items() if name not in NO_COMPUTATION} | vision


def _compared(name: str, found: Any, right: Any) -> Finding:
    items = found if isinstance(found, list | tuple) else [found]
    # Lists of lists may share their items, and take no end to compare or print.
    if any(isinstance(item, list | tuple | dict) for item in items):
        shown, same = f"a nested {type(found).__name__}", False
    else:
        shown, same = f"{found!s:.80}", _plain(found) == _plain(right)
    return Finding(SETTINGS, name, flaw="" if same else f"is {shown}; the config says {right}")


def _plain(value: Any) -> Any:
    """Return a value in which lists equal tuples, and every form of nothing equals None."""
    return list(value) if isinstance(value, tuple) else value or None


def saved_settings(checkpoint: MegatronCheckpoint) -> Mapping[str, Any]:
    """Return the settings in a checkpoint, by the names of its maker; empty if there are none."""
    file = checkpoint.folder / "run_config.yaml"
    return _run_config(file) if file.is_file() else checkpoint.arguments()


class _Loader(yaml.SafeLoader):
    """Loads YAML without merge keys (``<<``), which could double a mapping on every line."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave merge keys in place, for which there is no constructor."""


def _run_config(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text("utf-8"), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadInput(f"{file} cannot be read as YAML: {error!s:.200}. Copy it again.") from None
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, dict) else {}
