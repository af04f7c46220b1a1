"""Megatron is told of one model, by names that it knows, as flags and as a config."""

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
from tests.test_config import hybrid

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


def test_what_megatron_is_told_of_a_hybrid_model():
    fields = config_fields(Architecture.from_hf(hybrid(moe=True)))
    assert fields["experimental_attention_variant"] == "gated_delta_net"
    assert fields["linear_attention_freq"] == [1, 1, 1, 0]
    assert fields["attention_output_gate"]
    assert fields["layernorm_zero_centered_gamma"]
    assert fields["moe_shared_expert_intermediate_size"] == 28
    assert fields["moe_shared_expert_gate"]
    sizes = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads")
    assert [fields[f"linear_{name}"] for name in sizes] == [4, 16, 20, 4]
    assert fields["linear_num_value_heads"] == 8
    assert architecture_arguments(Architecture.from_hf(hybrid()))["rotary_percent"] == 0.25
    usual = config_fields(Architecture.from_hf(tiny_config(moe=True)))
    assert (
        not fields.keys()
        - usual.keys()
        - {
            *("attention_output_gate", "experimental_attention_variant", "linear_attention_freq"),
            *(f"linear_{name}" for name in (*sizes, "num_value_heads")),
            "moe_shared_expert_gate",
        }
    )
