"""The order of work is mcore's, and simulating it gives the times worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore_qwen3vl.layout import Durations, order_of_work, simulate


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches", "group"),
    [(4, 1, 9, 4), (4, 3, 8, 4), (2, 2, 6, 4), (4, 2, 4, 4), (3, 4, 12, 6)],
)
def test_the_order_is_mcore_s(ranks: int, chunks: int, micro_batches: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    table = get_schedule_table(micro_batches, chunks, group)
    for rank in range(ranks):
        place = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        virtual = chunks if chunks > 1 else None
        given = SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=virtual)
        _, _, ahead, _ = get_pp_rank_microbatches(
            micro_batches, chunks, group, p2p_communicator=given
        )
        found = order_of_work(rank, ranks, chunks, micro_batches, group)
        assert [(w.micro_batch, w.chunk) for w in found if w.forward] == table
        backwards = [(w.micro_batch, chunks - 1 - w.chunk) for w in found if not w.forward]
        assert backwards == table
        turns = [w.forward for w in found]
        steady = [True, False] * (len(table) - ahead)
        assert turns == [*[True] * ahead, *steady, *[False] * ahead]


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
