"""A pipeline rank works in the order of mcore's schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore_qwen3vl.training.pipeline_order import order_of_work


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
