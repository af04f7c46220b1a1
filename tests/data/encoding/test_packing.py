"""Best-fit packing loses no record, fits every row, and finds what fits tightly."""

from __future__ import annotations

import torch

from mcore_qwen3vl.data.encoding.packing import best_fit


def test_best_fit_packs_everything_once_within_capacity() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        capacity = 64 + trial
        lengths = torch.randint(1, capacity + 1, (40,), generator=generator).tolist()
        packs = best_fit(lengths, capacity)
        assert sorted(i for pack in packs for i in pack) == list(range(40))
        assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
        assert packs == sorted(sorted(pack) for pack in packs)
        # This is the bound of best-fit decreasing, with a trivial lower bound for the optimum.
        assert len(packs) <= 11 / 9 * max(-(-sum(lengths) // capacity), big(lengths, capacity)) + 4


def big(lengths: list[int], capacity: int) -> int:
    return sum(2 * length > capacity for length in lengths)


def test_best_fit_finds_the_tight_packing() -> None:
    assert best_fit([3, 7, 5, 5, 8, 2], 10) == [[0, 1], [2, 3], [4, 5]]
