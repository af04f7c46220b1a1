"""Groups of ranks that share a GPU do what gloo does, here with tensors on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import launch, shared_gpu
from mcore_qwen3vl.runtime.launch import describe_device, run_layout
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow
from tests.turns import slow_except

RANKS = 3
SPLITS = [[1, 2, 0], [0, 1, 3], [2, 2, 1]]
"""Rows that a rank sends to each, by sender."""


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def reduced(operation: Any) -> Callable[[Any], Tensor]:
    def run(group: Any) -> Tensor:
        # A transposed view has to be written through its strides.
        tensor = values(4, 5).t()
        dist.all_reduce(tensor, operation, group=group)
        return tensor

    return run


def reduced_to_one(group: Any) -> Tensor:
    tensor = values(4)
    dist.reduce(tensor, 1, group=group)
    return tensor if dist.get_rank() == 1 else torch.zeros(4)


def broadcast(group: Any) -> Tensor:
    tensor = values(2, 3, dtype=torch.bfloat16)
    dist.broadcast(tensor, 2, group=group)
    return tensor


def gathered(group: Any) -> Tensor:
    out = torch.empty(RANKS * 2, 3)
    dist.all_gather_into_tensor(out, values(2, 3), group=group)
    parts = [torch.empty(2, 3) for _ in range(RANKS)]
    dist.all_gather(parts, values(2, 3), group=group)
    return torch.cat([out, *parts])


def gathered_by_one(group: Any) -> Tensor:
    parts = [torch.zeros(3) for _ in range(RANKS)] if dist.get_rank() == 1 else None
    dist.gather(values(3), parts, 1, group=group)
    return torch.stack(parts) if parts else torch.zeros(1)


def scattered(group: Any) -> Tensor:
    parts = list(values(RANKS, 4)) if dist.get_rank() == 2 else None
    out = torch.empty(4)
    dist.scatter(out, parts, 2, group=group)
    return out


def reduce_scattered(group: Any) -> Tensor:
    out = torch.empty(2, 4)
    dist.reduce_scatter_tensor(out, values(2 * RANKS, 4), group=group)
    listed = torch.empty(4)
    dist.reduce_scatter(listed, list(values(RANKS, 4)), group=group)
    return torch.cat([out, listed[None]])


def exchanged(group: Any) -> Tensor:
    rank = dist.get_rank()
    received = [sizes[rank] for sizes in SPLITS]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, values(sum(SPLITS[rank]), 2), received, SPLITS[rank], group=group)
    even = torch.empty(RANKS, 2)
    dist.all_to_all_single(even, values(RANKS, 2), group=group)
    return torch.cat([out, even])


def sent_around(group: Any) -> Tensor:
    rank, out = dist.get_rank(), torch.empty(3)
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    messages = [
        dist.P2POp(dist.isend, values(3), after, group),
        dist.P2POp(dist.irecv, out, before, group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return out


def objects(group: Any) -> Tensor:
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, {"rank": dist.get_rank()}, group=group)
    dist.barrier(group)
    return torch.tensor([part["rank"] for part in parts])


OPERATIONS: dict[str, Callable[[Any], Tensor]] = {
    "sum": reduced(dist.ReduceOp.SUM),
    "largest": reduced(dist.ReduceOp.MAX),
    "to one rank": reduced_to_one,
    "broadcast": broadcast,
    "gather": gathered,
    "gather by one": gathered_by_one,
    "scatter": scattered,
    "reduce-scatter": reduce_scattered,
    "all-to-all": exchanged,
    "messages": sent_around,
    "objects": objects,
}


def _both() -> dict[str, tuple[Tensor, Tensor]]:
    staged = dist.new_group(backend=shared_gpu.register())
    assert isinstance(staged, shared_gpu.StagedGroup)
    return {name: (run(staged), run(None)) for name, run in OPERATIONS.items()}


def test_every_operation_gives_what_gloo_gives() -> None:
    for rank in run_layout(_both, RANKS):
        for name, (staged, gloo) in rank.items():
            torch.testing.assert_close(staged, gloo, msg=lambda text, name=name: f"{name}: {text}")


def _means() -> Tensor:
    staged = dist.new_group(backend=shared_gpu.register())
    tensor = torch.full((3,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=staged)
    return tensor


def test_a_mean_is_made_in_float32() -> None:
    for mean in run_layout(_means, RANKS):
        assert mean.dtype == torch.bfloat16
        assert mean.tolist() == [2.0] * 3


LAYOUTS = [Layout(tp=2, sp=True, ep=2), Layout(pp=2), Layout(cp=2)]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, LAYOUTS[0]), ids=str)
def test_ranks_that_share_a_gpu_equal_hugging_face(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """The ranks are forked, so what is replaced here is replaced in them."""
    start = dist.init_process_group

    def init_process_group(backend: str, **words: Any) -> None:
        start(shared_gpu.register(), **words)

    monkeypatch.setattr(launch.dist, "init_process_group", init_process_group)
    matrix.compare_row(MatrixRow("moe", str(layout), ("mixed",))).require()


@pytest.mark.parametrize(
    ("gpus", "world_size", "expected"),
    [
        (4, 4, [(0, "nccl"), (1, "nccl"), (2, "nccl"), (3, "nccl")]),
        (1, 2, [(0, "staged"), (0, "staged")]),
        (2, 4, [(0, "staged"), (1, "staged"), (0, "staged"), (1, "staged")]),
    ],
)
def test_ranks_share_gpus_only_where_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world_size: int, expected: list[tuple[int, str]]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)

    def chosen(rank: int) -> tuple[int, str]:
        work = launch._Work(_both, (), rank, world_size, 60.0, "cuda", Path())
        return launch._gpu_and_backend(work)

    assert [chosen(rank) for rank in range(world_size)] == expected


def test_a_report_says_that_ranks_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert describe_device("cpu", 4) == "cpu"
    assert describe_device("cuda", 1) == "cuda"
    assert describe_device("cuda", 4) == "cuda, 4 ranks on 1 GPU"
