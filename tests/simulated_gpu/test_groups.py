"""Process groups have this rank alone; what others send is assumed, or zeros."""

from __future__ import annotations

from mcore_qwen3vl.simulated_gpu import Workbench

HERE = "tests.simulated_gpu.programs"


def test_what_nobody_sends_is_zeros(workbench: Workbench) -> None:
    received, _ = workbench.call(f"{HERE}:received_shape", world_size=2)
    assert received == [0, 0, 0]


def test_what_a_process_sends_to_another_arrives(workbench: Workbench) -> None:
    """The store that they share carries it, in any group, whatever the order in a batch."""
    received, _ = workbench.call(f"{HERE}:messages", world_size=2)
    assert received == {rank: [[7, 1 - rank, 9], [0.5, 1 - rank]] * 2 for rank in (0, 1)}


def test_other_ranks_do_what_this_one_does(workbench: Workbench) -> None:
    found, report = workbench.call(f"{HERE}:collectives", rank=1, world_size=4)
    assert found == {
        "backends": ("nccl", "gloo"),
        "rank": (1, 4, 3),
        "objects": ["me"] * 4,
        "sum": 6.0,
        "gathered": [1, 2] * 4,
        "wrong splits": "",
    }
    traffic = {(t.group, t.operation): (t.calls, t.size) for t in report.interval("end").traffic}
    assert traffic["three (gloo)[3]", "all_reduce"] == (1, 4)
    calls, size = traffic["world[4]", "all_gather"]
    assert size >= 64
    assert calls >= 3


def test_canary_the_functions_of_torch_distributed_that_are_replaced(workbench: Workbench) -> None:
    from torch.distributed import distributed_c10d

    from mcore_qwen3vl.simulated_gpu import groups

    for name in groups.REPLACED:
        assert callable(getattr(distributed_c10d, name))
