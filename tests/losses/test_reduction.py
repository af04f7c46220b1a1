"""Sums over units count for the data sets that the units are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.losses import reduction


@pytest.mark.parametrize(
    ("data_sets", "groups"),
    [
        (("a", "b", "a"), (1, 2)),  # sequences are units: documents of a reranker
        (("a", "a", "b", "b", "b", "a", "a"), (2, 3, 2)),  # records are: queries and pairs
    ],
)
def test_units_count_for_their_data_set(
    data_sets: tuple[str, ...], groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction.parallel_state, "get_context_parallel_world_size", lambda: 2)
    each = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    batch: Any = SimpleNamespace(data_sets=data_sets, groups=groups)
    found = reduction.reduce_units(each.sum(), batch, {"loss": each, "other": -each})
    assert float(found.normaliser) == 1.5
    parts = {name: (float(a), float(b)) for name, (a, b) in found.data_sets.items()}
    assert parts == {"a": (3.0, 1.0), "b": (1.0, 0.5)}
