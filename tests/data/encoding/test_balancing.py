"""Packs have equal work; no sample is lost, and no pack is over capacity."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.packing import (
    Measure,
    Size,
    Workload,
    divide,
    pack_by_length,
    pack_by_work,
    uneven_work,
)
from mcore_qwen3vl.shapes import SHAPES

CAPACITY = 8192


def heavy_tailed(count: int, seed: int = 0) -> list[Size]:
    """Draw sizes, half of them with an image; long tails reach up to the capacity."""
    random = np.random.default_rng(seed)
    sizes = []
    for _ in range(count):
        text = int(min(8000, 50 * (1 + random.pareto(1.1))))
        patches = int(min(16384, 64 * (1 + random.pareto(0.5)))) if random.random() < 0.5 else 0
        text = min(text, CAPACITY - patches // 4)
        sizes.append(Size(text + patches // 4, patches, float(patches**2)))
    return sizes


@pytest.fixture(scope="module")
def model() -> Architecture:
    return Architecture.from_hf(SHAPES / "8b.json")


def stream(
    model: Architecture, sizes: list[Size], ranks: int, per_rank: int, rows_per_step: int = 1
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return rows of packs, with samples by place in the stream, and what each buffer left."""
    measures = [Measure(s.tokens, uneven_work(model, s)) for s in sizes]
    buffer: list[int] = []
    rows, lefts, place, carried = [], [], 0, 0
    while place + ranks * per_rank <= len(sizes):
        fresh = ranks * per_rank - len(buffer)
        buffer += range(place, place + fresh)
        place += fresh
        division = divide(
            [measures[i] for i in buffer],
            CAPACITY,
            ranks,
            carried=carried,
            rows_per_step=rows_per_step,
        )
        rows += [[[buffer[i] for i in pack] for pack in row] for row in division.rows]
        buffer = [buffer[i] for i in division.left]
        carried = len(buffer)
        lefts.append(list(buffer))
    return rows, lefts


def test_every_sample_comes_once_and_waits_for_one_buffer_at_most(model: Architecture) -> None:
    sizes = heavy_tailed(6000)
    rows, lefts = stream(model, sizes, ranks=8, per_rank=64)
    used = Counter(i for row in rows for pack in row for i in pack)
    assert set(used.values()) == {1}
    assert set(range(max(used) + 1)) - set(used) <= set(lefts[-1]) | set(range(5000, 6000))
    assert not any(set(a) & set(b) for a, b in pairwise(lefts))
    assert all(pack for row in rows for pack in row)
    tokens = [sum(sizes[i].tokens for i in pack) for row in rows for pack in row]
    assert max(tokens) <= CAPACITY
    assert np.mean(tokens) > 0.95 * CAPACITY


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_work_of_a_row_is_level(ranks: int, model: Architecture) -> None:
    """A row's work is more even than in packs by length, which are made without balancing."""
    load = Workload(model, heavy_tailed(30000), CAPACITY)
    per_step = 512 // ranks
    before = load.balance(list(pack_by_length(load.lengths, CAPACITY, ranks, 128)), per_step)
    rows = list(pack_by_work(load.measures(), CAPACITY, ranks, 128, per_step))
    after = load.balance(rows, per_step)
    assert after.micro_batch_step < 1.05 < 1.1 < before.micro_batch_step
    assert after.optimizer_step < 1.02
    assert after.filled > 0.97


def test_totals_of_the_ranks_are_level_and_steps_are_alike(model: Architecture) -> None:
    sizes = heavy_tailed(20000)
    rows, _ = stream(model, sizes, ranks=8, per_rank=512, rows_per_step=8)
    work = np.array([[sum(uneven_work(model, sizes[i]) for i in p) for p in row] for row in rows])
    totals = work.sum(0)
    assert totals.max() / totals.mean() < 1.01
    first = work.mean(1)[: len(work) // 8 * 8].reshape(-1, 8)
    steps = first.mean(1)
    # Rows are sorted within a step, and each step has rows of every amount of work.
    assert steps.std() / steps.mean() < 0.25 * first.std() / first.mean()


def test_few_samples_still_make_one_pack_a_rank() -> None:
    division = divide([Measure(10, 1.0)] * 5, 100, 4)
    assert [len(pack) for pack in division.rows[0]] == [2, 1, 1, 1]
    assert division.left == []


def test_it_is_deterministic(model: Architecture) -> None:
    assert stream(model, heavy_tailed(3000), 8, 64) == stream(model, heavy_tailed(3000), 8, 64)
