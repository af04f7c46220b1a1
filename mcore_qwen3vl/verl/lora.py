"""VERL's ``model.lora``, translated to an adapter of this package."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.targets import ATTENTION, EXPERTS, MLP, ROUTER
from mcore_qwen3vl.converters.live.sharded import unwrap
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.lora import adapter_module
from mcore_qwen3vl.training.lora.lora_run import LoraRun
from mcore_qwen3vl.verl.options import refuse

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""VERL's default ``target_modules``, in Megatron's names: all linears of the language model."""

TAKEN = ("type", "rank", "alpha", "dropout", "target_modules", "merge", "adapter_path")

DEFAULTS: dict[str, Any] = {
    "exclude_modules": [],
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "dtype": None,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
    "freeze_language_model": True,
    "fully_sharded_loras": False,
}
"""Megatron-Bridge's other options in VERL's configuration, which must keep these values."""


def lora_run(
    given: Mapping[str, Any], architecture: Architecture, source: str | Path, seed: int
) -> LoraRun | None:
    """Return the adapter that ``model.lora`` asks for; None if it has no rank and no path.

    Args:
        given: ``model.lora``, without OmegaConf's containers.
        source: the base checkpoint.
        seed: seed of the initial factors, which are the same under every layout.

    Raises:
        BadInput: options are not supported, each of which the message names; or training would
            refuse the same values of ``--lora-*``.
    """
    start = given.get("adapter_path")
    if not given.get("rank") and not start:
        return None
    _check(given)
    names = [*given.get("target_modules", LINEARS)]
    args = argparse.Namespace(
        lora_rank=None if start else given["rank"],
        lora_target=None if start else _targets(names, architecture),
        lora_alpha=None if start else given.get("alpha", 32),
        lora_dropout=None if start else given.get("dropout", 0.0),
        lora_init=start,
        task=None,
        lora_config=None,
        lora_rslora=False,
        lora_modules_to_save=None,
        hf_model=str(source),
        load_hf=str(source),
        pretrained_checkpoint=None,
        seed=seed,
    )
    return LoraRun(args, architecture)


def _check(given: Mapping[str, Any]) -> None:
    wrong = [
        f"model.lora.{name}: an option of Megatron-Bridge, which is not used here; leave it at "
        f"{DEFAULTS.get(name)!r}."
        for name, value in given.items()
        if name not in TAKEN and value != DEFAULTS.get(name)
    ]
    if given.get("type", "lora") != "lora":
        wrong.append("model.lora.type: use lora.")
    if not given.get("merge"):
        wrong.append(
            "model.lora.merge: the rollout cannot take an adapter without its base; set it to "
            "True, which sends merged weights and does not change the weights that train."
        )
    refuse(wrong)


def _targets(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Translate Megatron's names to PEFT's; other names, such as PEFT's own, stay as they are."""
    dense, moe = not all(architecture.moe_layers), any(architecture.moe_layers)
    query, key, value, output = ATTENTION
    gate, up, down = MLP
    meant = {
        "linear_qkv": [query, key, value],
        "linear_proj": [output],
        "linear_fc1": [*([gate, up] if dense else []), *([EXPERTS[0]] if moe else [])],
        "linear_fc2": [*([down] if dense else []), *([EXPERTS[1]] if moe else [])],
        "router": [ROUTER],
    }
    return [name for given in names for name in meant.get(given, [given])]


def switched_off(models: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Switch the adapter off within the block, so that the base model runs.

    Raises:
        BadInput: there is no adapter.
    """
    chunks = unwrap(models)
    if any(chunk.adapter is None for chunk in chunks):
        raise BadInput(
            "The reference is configured as the base model of an adapter, but there is no "
            "adapter: set model.lora.rank."
        )
    return adapter_module.switched_off([chunk.adapter for chunk in chunks])
