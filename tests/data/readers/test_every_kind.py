"""The same samples in every kind of file are read, and resumed alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.data import DataConfig
from tests.data.loaders import PACKED, MakeLoader, same
from tests.data.writers import COUNT, OTHERS, QUICK, TABLES, WRITERS
from tests.turns import slow_except


@pytest.mark.parametrize("name", slow_except(OTHERS, *QUICK))
def test_the_same_batches_from_every_kind_of_file(
    name: str, written: Callable[[str], Path], make: MakeLoader
) -> None:
    plain, other = make(written("jsonl")), make(written(name))
    for _ in range(COUNT + 2):
        ours, theirs = next(other), next(plain)
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.loss_weights, theirs.loss_weights)
        assert (ours.visual is None) == (theirs.visual is None)
        if ours.visual is not None:
            assert torch.equal(ours.visual.pixel_values, theirs.visual.pixel_values)


BALANCED = replace(PACKED, balance=True, micro_batches=2)
CONFIGS = {"plain": PACKED, "balanced": BALANCED}
RESUMED = [(config, name) for config in CONFIGS for name in WRITERS]


@pytest.mark.parametrize(
    ("config", "name"),
    slow_except(RESUMED, ("plain", "array"), ("plain", "saved"), ("balanced", "tars")),
)
def test_stopped_and_resumed_the_batches_are_the_same_bitwise(
    name: str, config: str, written: Callable[[str], Path], make: MakeLoader,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = written(name)
    options = {"config": CONFIGS[config], "dp_rank": 1, "dp_size": 2}
    uninterrupted = make(path, **options)
    for _ in range(4):
        next(uninterrupted)
    torch.save(uninterrupted.state_dict(), tmp_path / "state.pt")
    resumed = make(path, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(6):
        assert same(next(resumed), next(uninterrupted))


def test_a_state_from_before_records_had_an_order_resumes_tars(
    written: Callable[[str], Path], make: MakeLoader
) -> None:
    """Such a state names neither the order nor the rows of a micro-batch nor the start."""
    path = written("tars")
    uninterrupted, resumed = (make(path, config=CONFIGS["plain"]) for _ in range(2))
    for _ in range(4):
        next(uninterrupted)
    state = uninterrupted.state_dict()
    resumed.load_state_dict({k: state[k] for k in state.keys() - {"order", "rows", "start"}})
    for _ in range(6):
        assert same(next(resumed), next(uninterrupted))


@pytest.mark.slow  # data workers
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_resumed_with_workers(
    name: str, config: DataConfig, written: Callable[[str], Path], make: MakeLoader
) -> None:
    path = written(name)
    options = {"config": config, "dp_rank": 0, "dp_size": 2, "num_workers": 2}
    uninterrupted = make(path, **options)
    for _ in range(5):
        next(uninterrupted)
    state = uninterrupted.state_dict()
    resumed = make(path, **options)
    resumed.load_state_dict(state)
    for _ in range(5):
        assert same(next(resumed), next(uninterrupted))
