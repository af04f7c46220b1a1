"""Megatron's flags and a direct ``TransformerConfig`` describe the same model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.megatron_config import (
    architecture_arguments,
    config_fields,
    recommended_arguments,
)
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.tiny import tiny_config, write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.model import fields_from_flags

MODELS = {
    "dense": {},
    "tied": {"tie": True},
    "moe": {"moe": True},
    "mixed": {"moe": True, "text": {"mlp_only_layers": [1]}},
    "moe without a MoE layer": {"moe": True, "text": {"mlp_only_layers": [0, 1, 2, 3]}},
}
DIFFERENT = {
    "calculate_per_token_loss": "training divides by the trained tokens of the global batch",
    "moe_aux_loss_coeff": "training balances the experts, as far as there are any",
    "inference_sampling_seed": "Megatron passes --seed on",
    "gradient_accumulation_fusion": "training has a buffer that products add gradients to",
    "cp_comm_type": "Megatron spells its default out",
    "tensor_parallel_num_weight_shards": "Megatron spells its default out",
    "expert_tensor_parallel_num_weight_shards": "Megatron spells its default out",
}
"""Fields that differ between the two, and why."""


@pytest.mark.parametrize("model", MODELS)
def test_flags_and_config_describe_one_model(model: str, tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_tiny_checkpoint(tmp_path, **MODELS[model]))
    sizes = ["--seq-length", "128", "--micro-batch-size", "1", "--train-iters", "3", "--lr", "1"]
    args = validate(["--hf-model", str(tmp_path), "--cpu", *sizes], world_size=1).args
    from_flags = values(transformer_config(architecture, **fields_from_flags(args)))
    direct = values(transformer_config(architecture, params_dtype=args.params_dtype))
    expected = {*DIFFERENT} - (set() if any(architecture.moe_layers) else {"moe_aux_loss_coeff"})
    assert {name for name in direct if direct[name] != from_flags[name]} == expected
    assert args.untie_embeddings_and_output_weights == (not architecture.tie_word_embeddings)
    assert args.rotary_base == architecture.rope_theta


def values(config: Any) -> dict[str, Any]:
    """Return the config's fields, with partial functions as tuples that can be compared."""
    return {
        name: (value.func, value.args, value.keywords)
        if isinstance(value, functools.partial)
        else value
        for name, value in vars(config).items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_name_is_one_that_megatron_knows(model: str) -> None:
    from argparse import ArgumentParser

    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    architecture = Architecture.from_hf(tiny_config(**MODELS[model]))
    known = {action.dest for action in add_megatron_arguments(ArgumentParser())._actions}
    fixed, free = architecture_arguments(architecture), recommended_arguments(architecture)
    assert {*fixed, *free} <= known
    assert not {*fixed} & {*free}
    assert {*config_fields(architecture)} <= {*TransformerConfig.__dataclass_fields__}
