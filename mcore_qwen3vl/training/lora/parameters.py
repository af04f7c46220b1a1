"""Number of parameters that a LoRA run trains, by the groups of the memory estimate."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.peft_model import HFConfig, apply
from mcore_qwen3vl.converters.adapters.targets import resolve_targets
from mcore_qwen3vl.converters.mapping.parameters import Group


def trained_parameters(config: AdapterConfig, hf_config: HFConfig) -> Counter[Group]:
    """Count the trained values, in LoRA factors and in modules trained whole.

    The groups are those of ``mapping.parameters.count``. Factors are counted as if TP did not
    divide them, which is slightly too many.

    Raises:
        BadInput: see ``resolve_targets``.
    """
    counts: Counter[Group] = Counter()
    for name, spec in resolve_targets(config, hf_config).items():
        counts[_group(name)] += prod(spec.a_shape) + prod(spec.b_shape)
    for name, shape in apply(config, hf_config).saved.items():
        counts[_group(name)] += prod(shape)
    return counts


def _group(name: str) -> Group:
    if name.startswith("model.visual."):
        return Group("vision", None, False)
    if name.startswith("lm_head."):
        return Group("output layer", None, False)
    layer = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
    if layer is None:
        return Group("embedding" if "embed_tokens" in name else "norms", None, False)
    experts = ".mlp.experts." in name
    return Group("experts" if experts else "mlp", int(layer[1]), experts)
