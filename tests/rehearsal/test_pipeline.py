"""The simulated pipeline has the waiting of its ranks, and refuses what never ends."""

from __future__ import annotations

import pytest

from mcore_qwen3vl.rehearsal.pipeline import Durations, simulate


def test_a_long_first_virtual_stage_keeps_all_others_waiting() -> None:
    # One micro-batch runs through every virtual stage and back.
    stages = [[Durations(5, 7), Durations(1, 2)], [Durations(1, 2), Durations(1, 3)]]
    assert simulate(stages, 1) == 5 + 1 + 1 + 1 + 3 + 2 + 2 + 7
    # Rank 1 waits until rank 0 has finished both; then it works until rank 0 ends alone.
    assert simulate(stages, 2, 2) == 5 + 5 + (1 + 1 + 3 + 1 + 3 + 2) + 7 + 7


def test_a_last_group_smaller_than_the_pipeline_never_ends_and_is_refused() -> None:
    stages = [[Durations(1, 2)] * 2] * 6
    with pytest.raises(ValueError, match="32 micro-batches in groups of 6 wait for each other"):
        simulate(stages, 32)
    assert simulate(stages, 32, 8) > 32 * 6
