"""Rewrite a ``config.json``: to the other expert layout's form, to another dtype, unquantised.

The layout of the experts and the form of the config travel together, since the config is what
declares the layout. Fields that mean the same in both forms are left as they are.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import torch

from mcore_qwen3vl.config import ExpertLayout
from mcore_qwen3vl.converters.hf import fp8
from mcore_qwen3vl.converters.storage.dtypes import dtype_name

VERSIONS = {"published": "4.57.0", "v5": "5.17.0"}
"""``transformers_version`` written into a converted config: the oldest that has this form."""

Config = dict[str, Any]


def for_weights(
    config: Config,
    *,
    layout: ExpertLayout | None = None,
    dtype: torch.dtype | None = None,
    untied: bool = False,
) -> bytes | None:
    """The ``config.json`` that goes beside weights written here, none of which are quantised.

    Args:
        config: what the weights came with.
        layout: of their experts, if it changed.
        dtype: all of theirs, if it changed.
        untied: the embeddings were tied and are apart now.

    Returns:
        None if `config` is right as it is.
    """
    wanted = fp8.without(config)
    if untied:
        wanted = with_untied_embeddings(wanted)
    if layout is not None:
        wanted = with_layout(wanted, layout)
    if dtype is not None:
        wanted = with_dtype(wanted, dtype_name(dtype))
    return None if wanted == config else dumps(wanted)


def with_layout(config: Config, layout: ExpertLayout) -> Config:
    """`config` in the form that transformers 4.57 (``published``) or 5 (``v5``) writes."""
    config = deepcopy(config)
    text, vision = config["text_config"], config["vision_config"]
    (_published if layout == "published" else _v5)(text, vision, config["model_type"])
    # transformers 5 writes a wrong flag here; 4.57 follows it.
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    config["transformers_version"] = VERSIONS[layout]
    text.pop("transformers_version", None)
    _same_dtype_key(config)
    return config


def with_dtype(config: Config, dtype: str) -> Config:
    """`config` declaring `dtype` (torch's name) wherever it declares one, and at the top level."""
    config = deepcopy(config)
    for section in (config, config["text_config"], config["vision_config"]):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    return config


def with_untied_embeddings(config: Config) -> Config:
    """`config` of a model with a head of its own."""
    config = {**deepcopy(config), "tie_word_embeddings": False}
    if "tie_word_embeddings" in config["text_config"]:
        config["text_config"]["tie_word_embeddings"] = False
    return config


def dumps(config: Config) -> bytes:
    """A config file's content, as ``save_pretrained`` formats it."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _published(text: Config, vision: Config, model_type: str) -> None:
    rope = dict(text.pop("rope_parameters", None) or text.get("rope_scaling") or {})
    text["rope_theta"] = rope.pop("rope_theta", text.get("rope_theta"))
    text["rope_scaling"] = rope
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    vision.pop("rope_parameters", None)  # 4.57 has the tower's rotary base in code
    vision["model_type"] = model_type


def _v5(text: Config, vision: Config, model_type: str) -> None:
    rope = dict(text.pop("rope_scaling", None) or text.get("rope_parameters") or {})
    theta = text.pop("rope_theta", None)
    rope.setdefault("rope_theta", theta)
    text["rope_parameters"] = rope
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    vision["model_type"] = f"{model_type}_vision"


def _same_dtype_key(config: Config) -> None:
    """``dtype`` in place of ``torch_dtype``, which transformers dropped at 4.56."""
    for section in (config, config["text_config"], config["vision_config"]):
        if "torch_dtype" in section:
            section.setdefault("dtype", section["torch_dtype"])
            del section["torch_dtype"]
