"""The state of a loader says its kind as it always has, so that older checkpoints are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3vl.data import DataConfig
from tests.data.loaders import PACKED, MakeLoader
from tests.data.test_order import BALANCED, PADDED


@pytest.mark.parametrize(
    ("files", "config", "kind"),
    [
        ("tars", PADDED, "shards"),
        ("tars", PACKED, "shards"),
        ("tars", BALANCED, "shards"),
        ("jsonl", PADDED, "records"),
        ("jsonl", PACKED, "parts"),
        ("jsonl", BALANCED, "packs"),
    ],
)
def test_a_state_names_the_kind_of_its_loader(
    files: str, config: DataConfig, kind: str, written: Callable[[str], Path], make: MakeLoader
) -> None:
    state = make(written(files), config=config).state_dict()
    assert state["order"] == kind
    assert ("measures" in state) == config.balance
    assert ("history" in state) == (kind != "shards")


def test_a_validation_is_of_records_without_a_history(
    written: Callable[[str], Path], make: MakeLoader
) -> None:
    """It begins again with all records, so that none can have been appended since."""
    for files in ("jsonl", "tars"):
        state = make(written(files), config=PADDED, batches=2).state_dict()
        assert state["order"] == "records"
        assert "history" not in state
