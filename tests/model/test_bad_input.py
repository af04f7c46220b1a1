"""Options and inputs that cannot work are refused before any forward, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.inputs import require_right_padding
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


def _forward(layout: str, seq_len: int, inputs: dict[str, Any]) -> None:
    initialize(Layout.parse(layout))
    overrides = Layout.parse(layout).config_overrides()
    model = Qwen3VLModel.from_hf_config(DENSE, head_chunk=0, **overrides)
    arguments = {
        "input_ids": torch.zeros(1, seq_len, dtype=torch.int64),
        "position_ids": torch.zeros(3, 1, seq_len, dtype=torch.int64),
        **inputs,
    }
    model(**arguments)


def _packing(*bounds: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize(
    ("layout", "seq_len", "inputs", "message"),
    [
        ("cp2", 30, {}, "length 30: pad lengths to a multiple of 4"),
        ("tp2+sp", 31, {}, "the 31 tokens of each CP rank"),
        ("single", 8, {"position_ids": torch.zeros(1, 8)}, r"they have time, height and width"),
        ("single", 8, {"packed_seq_params": _packing(0, 6)}, "make the tail padding a sample"),
        ("cp2", 12, {"packed_seq_params": _packing(0, 6, 12)}, "packed sample.* has length 6"),
        (
            "tp2",
            8,
            {"labels": torch.zeros(1, 8, dtype=torch.int64), "runtime_gather_output": True},
            "leave runtime_gather_output and parallel_output=False out where there are labels",
        ),
        (
            "single",
            8,
            {
                "packed_seq_params": _packing(0, 8),
                "input_ids": torch.zeros(2, 8, dtype=torch.int64),
                "position_ids": torch.zeros(3, 2, 8),
            },
            "A packed micro-batch has one row; input_ids have 2",
        ),
    ],
)
def test_inputs(layout: str, seq_len: int, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run_layout(_forward, Layout.parse(layout).world_size, layout, seq_len, inputs)


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


def test_only_padding_on_the_right_passes_without_a_mask() -> None:
    padding = torch.tensor([[False, False, True], [False, False, False]])
    require_right_padding(padding)
    with pytest.raises(BadInput, match="padding on the right only"):
        require_right_padding(padding.flip(1))
