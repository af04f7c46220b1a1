"""A saved loader goes on on another number of ranks, and states that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.data import DataConfig, redistribute
from mcore_qwen3vl.errors import BadInput
from tests.data.loaders import PACKED, MakeLoader, lines
from tests.turns import slow


@pytest.mark.parametrize(("old", "new"), slow(((2, 2), (4, 1)), ((2, 2), (1, 4)), ((4, 1), (2, 2))))
def test_resume_on_another_number_of_ranks(
    old: tuple[int, int], new: tuple[int, int], make: MakeLoader, records: Path
) -> None:
    """No sample is lost or repeated, though each worker packs its own part."""
    states, seen = [], []
    config = DataConfig(seq_length=256, packing=True, packing_buffer=1, shuffle=False)
    for rank in range(old[0]):
        loader = make(records, config=config, dp_rank=rank, dp_size=old[0], num_workers=old[1])
        seen += [lines(next(loader))[0] for _ in range(12 // old[0])]
        states.append(loader.state_dict())
    for rank, state in enumerate(redistribute(states, new[0])):
        assert (state["world_size"], state["num_workers"]) == new
        loader = make(records, config=config, dp_rank=rank, dp_size=new[0], num_workers=new[1])
        loader.load_state_dict(state)
        seen += [lines(next(loader))[0] for _ in range(28 // new[0])]
    assert len(seen) == len(set(seen)) == 40


def test_states_that_do_not_fit_are_refused(make: MakeLoader, records: Path) -> None:
    states = [
        make(records, config=PACKED, dp_rank=rank, dp_size=2, num_workers=1).state_dict()
        for rank in range(2)
    ]
    with pytest.raises(BadInput, match="rank 1 of 2 with 1 workers, but this is rank 0"):
        make(records, config=PACKED, dp_size=2, num_workers=1).load_state_dict(states[1])
    with pytest.raises(BadInput, match=r"an earlier version, .*--packing.* --finetune"):
        make(records, dp_size=2, num_workers=1).load_state_dict(states[0])
    with pytest.raises(BadInput, match="cannot be divided over 4 ranks"):
        redistribute(states, 4)
    with pytest.raises(BadInput, match="all 2 data-parallel ranks"):
        redistribute(states[:1], 1)
