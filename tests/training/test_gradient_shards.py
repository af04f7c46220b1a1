"""A rank scales the gradients that the distributed optimizer reads, and no others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.training.gradient_shards import scale_gradients

GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
HALF = torch.tensor(0.5)


def buffer_of(*buckets: Tensor, extra: Tensor | None = None) -> Any:
    return SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=values) for values in buckets],
        data_parallel_group=GROUP,
        extra_main_grads=[] if extra is None else [extra],
    )


def chunk_of(dense: Any, experts: Any, *, sharded: bool = True, whole: bool = False) -> Any:
    every = [b.grad_data for buffer in (dense, experts) for b in buffer.buckets]
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=sharded),
        force_all_reduce=whole,
        buffers=[dense],
        expert_parallel_buffers=[experts],
        scale_gradients=partial(_scale_all, every),
    )


def _scale_all(buckets: list[Tensor], factor: Tensor) -> None:
    for values in buckets:
        values *= factor


def test_the_shards_of_this_rank_are_scaled() -> None:
    first, second, experts = torch.ones(4), torch.ones(6), torch.ones(2)
    extra = torch.ones(3)
    scale_gradients(chunk_of(buffer_of(first, second, extra=extra), buffer_of(experts)), HALF)
    assert first.tolist() == [1, 1, 0.5, 0.5]
    assert second.tolist() == [1, 1, 1, 0.5, 0.5, 0.5]
    assert experts.tolist() == [1, 0.5]
    assert extra.tolist() == [0.5] * 3


@pytest.mark.parametrize("how", [{"sharded": False}, {"whole": True}], ids=str)
def test_what_every_rank_has_whole_is_scaled_whole(how: dict[str, bool]) -> None:
    values, experts = torch.ones(4), torch.ones(2)
    scale_gradients(chunk_of(buffer_of(values), buffer_of(experts), **how), HALF)
    assert [*values.tolist(), *experts.tolist()] == [0.5] * 6
