"""Packs have equal work and lose no sample, and they stay those of earlier versions."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.division import divide
from mcore_qwen3vl.data.sizes import Size, uneven_works
from mcore_qwen3vl.data.workload import Workload, pack_by_length, pack_by_work
from mcore_qwen3vl.published_configs import PUBLISHED

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
    return Architecture.from_hf(PUBLISHED / "8b.json")


def stream(
    model: Architecture, sizes: list[Size], ranks: int, per_rank: int, rows_per_step: int = 1
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return rows of packs, with samples by place in the stream, and what each buffer left."""
    lengths, works = np.array([s.tokens for s in sizes]), uneven_works(model, sizes)
    buffer: list[int] = []
    rows, lefts, place, carried = [], [], 0, 0
    while place + ranks * per_rank <= len(sizes):
        fresh = ranks * per_rank - len(buffer)
        buffer += range(place, place + fresh)
        place += fresh
        division = divide(
            lengths[buffer],
            works[buffer],
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
    rows = list(pack_by_work(load.lengths, load.extra, CAPACITY, ranks, 128, per_step))
    after = load.balance(rows, per_step)
    assert after.micro_batch_step < 1.05 < 1.1 < before.micro_batch_step
    assert after.optimizer_step < 1.02
    assert after.filled > 0.97


def test_totals_of_the_ranks_are_level_and_steps_are_alike(model: Architecture) -> None:
    sizes = heavy_tailed(20000)
    rows, _ = stream(model, sizes, ranks=8, per_rank=512, rows_per_step=8)
    works = uneven_works(model, sizes)
    work = np.array([[works[pack].sum() for pack in row] for row in rows])
    totals = work.sum(0)
    assert totals.max() / totals.mean() < 1.01
    first = work.mean(1)[: len(work) // 8 * 8].reshape(-1, 8)
    steps = first.mean(1)
    # Rows are sorted within a step, and each step has rows of every amount of work.
    assert steps.std() / steps.mean() < 0.25 * first.std() / first.mean()


def test_few_samples_still_make_one_pack_a_rank() -> None:
    division = divide([10] * 5, [1.0] * 5, 100, 4)
    assert [len(pack) for pack in division.rows[0]] == [2, 1, 1, 1]
    assert division.left == []


def test_it_is_deterministic(model: Architecture) -> None:
    assert stream(model, heavy_tailed(3000), 8, 64) == stream(model, heavy_tailed(3000), 8, 64)


def whole_samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw lengths, with a long tail, and works; both are whole numbers, the same everywhere."""
    random = np.random.default_rng(seed)
    lengths = 50 + 8000 // random.integers(1, 40, count) * random.integers(1, 16, count) // 16
    patches = random.integers(0, 2, count) * random.integers(1, 4 * lengths)
    return lengths, (lengths**2 + 4096 * patches).astype(np.float64)


def test_packs_are_those_of_checkpoints_of_earlier_versions() -> None:
    """A run counts its packs from the beginning: other packs would repeat samples at a resume."""
    divisions = []
    for ranks in (1, 8, 40):
        lengths, works = whole_samples(128 * ranks, seed=ranks)
        division = divide(lengths, works, CAPACITY, ranks, carried=17 * ranks, rows_per_step=3)
        divisions.append([division.rows, division.left])
    digest = hashlib.sha256(json.dumps(divisions).encode()).hexdigest()
    assert digest[:16] == "753d4ab6a97c0516"  # of all packs in one heap


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_goes_into_the_pack_with_the_least_work_that_has_room(seed: int) -> None:
    """Also where samples are equal or have no work, or none of the others fits."""
    random = np.random.default_rng(seed)
    capacity, ranks, count = (int(random.integers(*ends)) for ends in ((4, 300), (1, 9), (1, 150)))
    lengths = random.choice([1, capacity // 3, capacity // 2, capacity - 1, capacity], count)
    lengths = np.where(random.random(count) < seed % 3 / 2, random.integers(1, 9, count), lengths)
    lengths = lengths.clip(1, capacity)
    works = random.integers(0, seed % 4 + 1, count).astype(float)
    carried = int(random.integers(0, count + 1))
    division = divide(lengths, works, capacity, ranks, carried=carried)

    packs = max(1, lengths.sum() // (capacity * ranks)) * ranks
    share = works.sum() / packs or 1.0
    weights = np.maximum(lengths / capacity, works / share).tolist()
    rooms, totals = np.full(packs, capacity), np.zeros(packs)
    expected: list[list[int]] = [[] for _ in range(packs)]
    left = []
    for item in sorted(range(count), key=lambda i: (i >= carried, -weights[i])):
        fitting = np.flatnonzero(rooms >= lengths[item])
        if not fitting.size:
            left.append(item)
            continue
        pack = fitting[totals[fitting].argmin()]
        expected[pack].append(item)
        rooms[pack] -= lengths[item]
        totals[pack] += works[item]
    made = [pack for row in division.rows for pack in row]
    assert sorted(made) == sorted(map(sorted, expected))
    assert division.left == sorted(left)


def test_its_time_grows_with_the_number_of_samples_alone() -> None:
    """Eight times the ranks take about eight times as long: each data worker divides for all."""

    def seconds(ranks: int) -> float:
        samples = whole_samples(256 * ranks)
        times = []
        for _ in range(3):
            start = time.process_time()
            divide(*samples, CAPACITY, ranks)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(128) < 25 * seconds(16)  # 50 times, where all packs are looked through
