"""Integers on the device are true, and routing is balanced, or skewed if asked for."""

from __future__ import annotations

from mcore_qwen3vl.simulated_gpu import Workbench

HERE = "tests.simulated_gpu.programs"


def test_integers_are_true_and_routing_is_balanced(workbench: Workbench) -> None:
    found, _ = workbench.call(f"{HERE}:integers")
    assert found == {
        "item": 26,
        "selected": [5, 5],
        "nonzero": [0, 2],
        "bounds": [0, 3, 4, 6],
        "sorted": [0, 2, 1, 3],
        "histogram": [0, 1, 1, 1],
        "weighted histogram": [5],
        "repeated": [5, 5, 5, 7, 5, 5, 9, 9, 9],
        "product": [5 * 7 * 5 * 9, 6 * 8 * 6 * 10],
        "router": [[0, 1], [2, 3], [0, 1]],
        "on the host": -7.5,
        "floats": [0, 0, 2.5],
        "floats are below": [False, False],
    }


def test_skewed_routing_crowds_the_first_quarter_of_the_experts(workbench: Workbench) -> None:
    chosen, _ = workbench.call(f"{HERE}:routing", routing="skewed")
    assert chosen == [[0, 1], [0, 1], [2, 3], [2, 3]]
    chosen, _ = workbench.call(f"{HERE}:routing")
    assert chosen == [[0, 1], [2, 3], [4, 5], [6, 7]]
