"""Fused features keep dtypes and gradients; inputs that cannot work are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.layer import add_to_rows
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, fuse, plan_fusion
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

B, S, H = 3, 16, 5
MASK = torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.4
TOKEN_INDEX = torch.nonzero(MASK.flatten()).squeeze(1)
N = len(TOKEN_INDEX)


@pytest.mark.parametrize("token_index", [None, torch.tensor([1, 2])])
def test_features_without_a_local_row_still_get_a_gradient(token_index):
    """Without it the vision tower's backward, with its collectives, would not run on this rank."""
    plan = plan_fusion(token_index, torch.arange(8, 16), seq_len=S, batch_size=1)
    features = torch.randn(0 if token_index is None else 2, H, requires_grad=True)
    layer = torch.randn_like(features).requires_grad_()
    hidden = fuse(torch.randn(8, 1, H), features, plan)
    hidden = add_to_rows(hidden, plan.select(layer), plan.destination)
    hidden.sum().backward()
    for leaf in (features, layer):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_features_take_the_hidden_states_dtype():
    plan = plan_fusion(TOKEN_INDEX, torch.arange(S), seq_len=S, batch_size=B)
    hidden = fuse(torch.zeros(S, B, H, dtype=torch.bfloat16), torch.randn(N, H), plan)
    assert hidden.dtype == torch.bfloat16
    hidden = add_to_rows(hidden, plan.select(torch.randn(N, H)), plan.destination)
    assert hidden.dtype == torch.bfloat16


DENSE = Architecture.from_hf(tiny_config())


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
