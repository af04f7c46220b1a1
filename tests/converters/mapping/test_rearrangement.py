"""Rearrangements have an inverse, and fetch no more than a slice needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.rearrangement import (
    Rearrangement,
    concatenate,
    identity,
    pad_rows,
    qkv,
    transpose,
)
from mcore_qwen3vl.converters.storage.boxes import Shape


def test_gates_follow_the_queries_of_their_group() -> None:
    """HF has the query of head h at 100 h, then its gate at 100 h + 50."""

    def numbered(*starts: int) -> Tensor:
        return torch.tensor([[start + i] for start in starts for i in (0, 1)])

    query = numbered(0, 50, 100, 150, 200, 250, 300, 350)
    key, value = numbered(1000, 1100), numbered(2000, 2100)
    how = qkv(heads=4, kv_heads=2, head_dim=2, gated=True)
    got = how.to_mcore(query, key, value)
    # fmt: off
    assert got.flatten().tolist() == [
        0, 1, 100, 101, 50, 51, 150, 151, 1000, 1001, 2000, 2001,
        200, 201, 300, 301, 250, 251, 350, 351, 1100, 1101, 2100, 2101,
    ]
    # fmt: on
    for found, wanted in zip(how.to_hf(got), (query, key, value), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        (identity(7), [(7, 3, 2)]),
        (identity(7), [(7,)]),
        (qkv(6, 2, 4), [(24, 5), (8, 5), (8, 5)]),
        (concatenate(5, 5), [(5, 3), (5, 3)]),
        (transpose(9), [(4, 9)]),
        (pad_rows(7, 12), [(7, 5)]),
    ],
)
def test_inverse_and_every_slice(how: Rearrangement, shapes: list[Shape]) -> None:
    hf = [torch.randn(shape) for shape in shapes]
    mcore = how.to_mcore(*hf)
    assert len(mcore) == how.rows
    assert mcore.is_contiguous()
    for back, original in zip(how.to_hf(mcore), hf, strict=True):
        assert torch.equal(back, original)
        assert back.is_contiguous()
    columns = tuple(slice(0, n) for n in mcore.shape[1:])
    narrow = tuple(slice(1, n) for n in mcore.shape[1:])
    for start in range(how.rows):
        for stop in range(start + 1, how.rows + 1):
            for rest in (columns, narrow):
                box = (slice(start, stop), *rest)
                assert torch.equal(how.take(lambda s, part: hf[s][part], box), mcore[box])


def test_a_slice_fetches_nothing_it_does_not_need() -> None:
    how = concatenate(8, 8)
    fetched: list[tuple[int, tuple[slice, ...]]] = []

    def fetch(source: int, part: tuple[slice, ...]) -> Tensor:
        fetched.append((source, part))
        return torch.zeros([s.stop - s.start for s in part])

    how.take(fetch, (slice(6, 9), slice(2, 3)))
    assert fetched == [(0, (slice(6, 8), slice(2, 3))), (1, (slice(0, 1), slice(2, 3)))]
