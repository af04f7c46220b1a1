"""Options that cannot work are refused before any forward, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

DENSE = Architecture.from_hf(tiny_config())
MOE = Architecture.from_hf(tiny_config(moe=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input needs Transformer Engine"),
        ({"fp8": "hybrid"}, "fp8 needs Transformer Engine"),
        ({"fp4": "e2m1"}, "fp4 needs Transformer Engine"),
        ({"use_te_activation_func": True}, "use_te_activation_func needs Transformer Engine"),
        ({"recompute_modules": ["core_attn", "layernorm"]}, "layernorm needs Transformer Engine"),
        ({"attention_dropout": 0.1}, "no attention dropout"),
        ({"qk_layernorm": False}, "drop them from checkpoints silently"),
        (
            {"fp32_residual_connection": True, "params_dtype": torch.bfloat16},
            "products in half precision",
        ),
        ({"cuda_graph_impl": "transformer_engine"}, "DeepStack out"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "overlap_p2p_comm": False,
            },
            "wrong results on the CPU backend",
        ),
        (
            {"pipeline_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
            "use moe_token_dispatcher_type alltoall",
        ),
    ],
)
def test_overrides_that_would_be_ignored_or_wrong(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        transformer_config(MOE, **overrides)


def test_unknown_spec() -> None:
    with pytest.raises(BadInput, match="use 'torch' or 'te'"):
        transformer_config(DENSE, spec="apex")  # type: ignore[arg-type]


def _te_without_te() -> None:
    initialize(Layout())
    Qwen3VLModel.from_hf_config(DENSE, spec="te")


def test_te_spec_without_transformer_engine() -> None:
    with pytest.raises(BadInput, match="te spec needs Transformer Engine and a GPU"):
        run_layout(_te_without_te, 1)


def _split_without_variable_lengths() -> None:
    initialize(Layout(pp=2))
    config = replace(
        transformer_config(DENSE, pipeline_model_parallel_size=2), variable_seq_lengths=False
    )
    Qwen3VLModel(config, DENSE, post_process=False)


def test_features_that_could_not_travel() -> None:
    with pytest.raises(BadInput, match="leaves 1 of 3 DeepStack layers to later stages"):
        run_layout(_split_without_variable_lengths, 2)
