"""A run may resume with EP from a checkpoint without, and without EP from one with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.optimizer import regroup
from mcore_qwen3vl.verify.curves import (
    DISTRIBUTED,
    OTHER_LAYOUT,
    Job,
    curve_of,
    train,
    whole_and_half,
    worst_difference,
)


def group(rate: float, expert: bool) -> dict[str, Any]:
    return {"lr": rate, "is_expert_parallel": expert}


def saved(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": list(groups)}, "param_state_sharding_type": "some"}


def test_one_optimizers_state_serves_two_of_which_a_rank_may_own_nothing() -> None:
    state = {**saved(group(1.0, False), group(2.0, False)), 1: {"param_state": "asked"}}
    found = regroup(state, 2)
    assert list(found) == [0, 1]
    assert "param_state" not in found[0]
    assert found[1]["param_state"] == "asked"
    for one in found.values():
        assert one["param_state_sharding_type"] == "some"
        groups = one["optimizer"]["param_groups"]
        for rate in (1.0, 2.0):
            assert group(rate, True) in groups
            assert group(rate, False) in groups


def test_the_state_of_two_serves_one() -> None:
    parts = {0: saved(group(1.0, False)), 1: saved(group(2.0, True))}
    found = regroup({**parts, "param_state": "asked"}, 1)
    assert found["param_state"] == "asked"
    assert found["param_state_sharding_type"] == "some"
    groups = found["optimizer"]["param_groups"]
    # Megatron looks groups up by their options, and takes the last of equal ones.
    assert groups[-2:] == [group(1.0, False), group(2.0, True)]
    assert group(2.0, False) in groups


def test_the_same_number_stays_as_it_is() -> None:
    state = {0: saved(group(1.0, False)), 1: saved(group(2.0, True))}
    assert regroup(state, 2) is state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ep2xdp2", "--num-workers", "1"), ("tp2xetp2+sp", "--num-workers", "2")),
        (("tp2xdp2+sp", "--num-workers", "2"), ("ep4xdp4", "--num-workers", "1")),
    ],
)
def test_experts_go_on_where_they_are_divided_otherwise(
    before: tuple[str, ...], after: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    """With EP, experts have an optimizer of their own, unlike in a checkpoint without EP."""
    first, then = (
        Job(moe, data, Layout.parse(layout), steps=4, flags=(*DISTRIBUTED, *flags))
        for layout, *flags in (before, after)
    )
    whole, save = whole_and_half(first, tmp_path)
    rest = train(then, tmp_path / "rest", "--save", str(save))
    difference = worst_difference(curve_of(rest), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT
