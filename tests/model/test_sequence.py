import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import length_multiple, local_positions


def test_without_cp_and_sp_a_rank_holds_everything() -> None:
    assert local_positions(5, cp_size=1, cp_rank=0).tolist() == [0, 1, 2, 3, 4]


def test_cp_pairs_a_chunk_from_the_start_with_one_from_the_end() -> None:
    ranks = [local_positions(12, cp_size=2, cp_rank=r).tolist() for r in range(2)]
    assert ranks == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]


def test_packed_cp_cuts_each_sample() -> None:
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    ranks = [local_positions(12, cp_size=2, cp_rank=r, cu_seqlens=bounds) for r in range(2)]
    assert [r.tolist() for r in ranks] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def test_sp_cuts_what_cp_left() -> None:
    def held(tp_rank: int) -> list[int]:
        return local_positions(
            12, cp_size=2, cp_rank=1, tp_size=3, tp_rank=tp_rank, sequence_parallel=True
        ).tolist()

    assert [held(r) for r in range(3)] == [[3, 4], [5, 6], [7, 8]]


def test_tp_without_sp_holds_all() -> None:
    held = local_positions(7, cp_size=1, cp_rank=0, tp_size=2, tp_rank=1)
    assert held.tolist() == list(range(7))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_ranks_together_hold_every_position_once(cp: int, tp: int, packed: bool) -> None:
    bounds = torch.tensor([0, 16, 24, 24, 64]) if packed else None
    held = [
        local_positions(
            64,
            cp_size=cp,
            cp_rank=c,
            tp_size=tp,
            tp_rank=t,
            sequence_parallel=True,
            cu_seqlens=bounds,
        )
        for c in range(cp)
        for t in range(tp)
    ]
    assert {len(part) for part in held} == {64 // cp // tp}
    assert torch.cat(held).sort().values.tolist() == list(range(64))


def test_lengths_that_do_not_divide_are_refused_with_the_remedy() -> None:
    with pytest.raises(BadInput, match=r"length 10.*multiple of 4"):
        local_positions(10, cp_size=2, cp_rank=0)
    with pytest.raises(BadInput, match=r"packed sample.*length 6.*multiple of 4"):
        local_positions(14, cp_size=2, cp_rank=0, cu_seqlens=torch.tensor([0, 8, 14]))
    with pytest.raises(BadInput, match=r"10 tokens.*TP 4.*multiple of 4"):
        local_positions(10, cp_size=1, cp_rank=0, tp_size=4, sequence_parallel=True)
    with pytest.raises(BadInput, match="from 0 to 8 over a packed sequence of 10"):
        local_positions(10, cp_size=1, cp_rank=0, cu_seqlens=torch.tensor([0, 4, 8]))


@pytest.mark.parametrize(("cp", "tp", "expected"), [(1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 3, 12)])
def test_length_multiple_is_the_smallest_that_divides(cp: int, tp: int, expected: int) -> None:
    multiple = length_multiple(cp, tp)
    assert multiple == expected
    local_positions(multiple, cp_size=cp, cp_rank=0, tp_size=tp, sequence_parallel=True)
