"""Rewrite a ``config.json`` for another expert layout, another dtype, or without quantisation.

The layout of the experts and the form of the config change together, since the form of the config
declares the layout. Fields that mean the same in both forms are left as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from mcore_qwen3vl.config import ExpertLayout, family_of, rope_of, text_section
from mcore_qwen3vl.converters.hf import quantized
from mcore_qwen3vl.converters.hf.shards import TensorSpec
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.labels import Labels

VERSIONS = {"published": "4.57.0", "v5": "5.17.0"}
"""The ``transformers_version`` written into a converted config: the oldest with this form."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Changes:
    """How converted weights differ from the weights that a config came with.

    Attributes:
        layout: the experts' new layout, if it changed.
        dtype: dtype of the weights, if it is another than the config states.
        untied: whether the embeddings were tied and no longer are.
        labels: labels of the classifier's head, if the weights have one.
        vocab_size: new number of rows of embedding and head, if it changed.
        files: content of other files that changed or are new, by name.
    """

    layout: ExpertLayout | None = None
    dtype: torch.dtype | None = None
    untied: bool = False
    labels: Labels | None = None
    vocab_size: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def changed_config(self, config: Config) -> bytes | None:
        """Return the ``config.json`` for the converted weights, which are never quantised.

        None if `config`, which the source weights came with, is right as it is.
        """
        wanted = quantized.without_quantization(config)
        if self.untied:
            wanted |= {"tie_word_embeddings": False}
            if "tie_word_embeddings" in (text := text_section(wanted)):
                text |= {"tie_word_embeddings": False}
        if self.vocab_size is not None:
            for section in (wanted, text_section(wanted)):
                if "vocab_size" in section:
                    section["vocab_size"] = self.vocab_size
        if self.labels:
            wanted = self.labels.in_config(wanted)
        if self.layout is not None:
            wanted = in_transformers_form(wanted, self.layout)
        if self.dtype is not None:
            wanted = with_dtype(wanted, dtype_name(self.dtype))
        return None if wanted == config else dumps(wanted)


def in_transformers_form(config: Config, layout: ExpertLayout) -> Config:
    """Return `config` in the form that transformers 4.57 (``published``) or 5 (``v5``) writes.

    That of a hybrid model has one form only, and is left as it is.
    """
    config = deepcopy(config)
    if family_of(config).hybrid:
        return config
    text, vision = config["text_config"], config["vision_config"]
    family = "qwen3_vl_moe" if family_of(config).moe else "qwen3_vl"
    (_change_to_published if layout == "published" else _change_to_v5)(text, vision, family)
    # transformers 5 writes a wrong flag here; 4.57 follows it.
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    config["transformers_version"] = VERSIONS[layout]
    text.pop("transformers_version", None)
    for section in (config, text, vision):  # transformers dropped ``torch_dtype`` at 4.56
        if "torch_dtype" in section:
            section.setdefault("dtype", section["torch_dtype"])
            del section["torch_dtype"]
    return config


def with_dtype(config: Config, dtype: str) -> Config:
    """Return `config` with `dtype` (torch's name) wherever it has a dtype, and at the top level."""
    config = deepcopy(config)
    for section in (config, text_section(config), config.get("vision_config", {})):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    return config


def dtype_to_state(config: Config, stored: Iterable[TensorSpec]) -> torch.dtype | None:
    """Return the dtype that a config has to state for weights; None if it is right as it is.

    It is that of most of the values: transformers casts all of them to the dtype of the config.

    Args:
        stored: dtype and shape of each tensor.
    """
    values: Counter[torch.dtype] = Counter()
    for tensor in stored:
        values[tensor.dtype] += prod(tensor.shape)
    most = max(values, key=values.__getitem__)
    # Of a section that states another, vLLM and transformers need not ask the same one.
    sections = (config, text_section(config), config.get("vision_config", {}))
    stated = {section.get(key) for section in sections for key in ("dtype", "torch_dtype")}
    return most if stated - {None, dtype_name(most)} else None


def dumps(config: Config) -> bytes:
    """Return the content of a config file, formatted as ``save_pretrained`` does."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _change_to_published(text: Config, vision: Config, family: str) -> None:
    """Change the sections in place to the form of transformers 4.57."""
    rope = rope_of(text)
    text.pop("rope_parameters", None)
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    vision.pop("rope_parameters", None)  # the vision tower's rotary base is in 4.57's code
    vision["model_type"] = family


def _change_to_v5(text: Config, vision: Config, family: str) -> None:
    """Change the sections in place to the form of transformers 5."""
    text["rope_parameters"] = rope_of(text)
    text.pop("rope_scaling", None)
    text.pop("rope_theta", None)
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    vision["model_type"] = f"{family}_vision"
