"""Gradients that the TP group reduces in pieces equal those that mcore reduces at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training import hooks

SIZES = {"whole": (5, 7), "cut": (6, 3), "norm": (11,), "mean": (4,), "last": (9, 2)}
MARKS = {
    "whole": "sequence_parallel",
    "norm": "sequence_parallel",
    "mean": "average_gradients_across_tp_domain",
    "last": "sequence_parallel",
}


def chunk() -> Any:
    """Make a model chunk like one that DDP wraps, with this rank's gradients."""
    rank = torch.distributed.get_rank()
    module = nn.ParameterDict({name: torch.zeros(size) for name, size in SIZES.items()})
    for number, (name, parameter) in enumerate(module.items()):
        made = torch.Generator().manual_seed(10 * rank + number)
        parameter.main_grad = torch.randn(parameter.shape, generator=made)
        if name in MARKS:
            setattr(parameter, MARKS[name], True)
    module.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    return module


def on_rank(piece: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Return gradients reduced by mcore at once, those reduced in pieces, and the piece count."""
    from importlib import import_module

    initialize(Layout(tp=2, sp=True))
    module = import_module("megatron.core.distributed.finalize_model_grads")
    original = module._allreduce_non_tensor_model_parallel_grads
    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=True)
    calls = 0

    def counted(model: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        original(model, *args)

    hooks.PIECE = piece
    at_once, in_pieces = chunk(), chunk()
    original([at_once], config, None)
    hooks.reduce_in_pieces(counted, [in_pieces], config, None)
    return [p.main_grad for p in at_once.values()], [p.main_grad for p in in_pieces.values()], calls


@pytest.mark.parametrize(("piece", "calls"), [(46, 2), (20, 3), (1000, 1)])
def test_pieces_add_up_to_what_mcore_reduces_at_once(piece: int, calls: int) -> None:
    for expected, found, made in run_layout(on_rank, 2, piece):
        assert made == calls
        for name, want, got in zip(SIZES, expected, found, strict=True):
            assert torch.equal(want, got), name
