"""The position in the data is saved whole, or its lack is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.training.checkpoints import data_state
from tests.test_files import full_disk


def test_a_state_of_more_ranks_than_the_save_had_is_not_read(tmp_path: Path) -> None:
    folder = data_state.folder_of(tmp_path, 5)
    folder.mkdir(parents=True)
    torch.save({"rank": 0, "world_size": 1, "num_workers": 0}, folder / "rank_00000.pt")
    torch.save({"rank": 1, "world_size": 2, "num_workers": 0}, folder / "rank_00001.pt")
    loader: Any = Recorder()
    data_state.load(loader, tmp_path, 5, 0, 1)
    assert loader.state["world_size"] == 1


class Recorder:
    """A loader that takes any state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_full_disk_is_named_as_such_where_the_position_in_the_data_is_saved(
    tmp_path: Path,
) -> None:
    class Reading:
        def state_dict(self, position: Any) -> dict[str, Any]:
            return {"positions": list(range(1000))}

    loader: Any = Reading()
    with full_disk(64), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        data_state.save(loader, tmp_path, 3, 0)  # a limit's error, in place of a full disk's
    assert not list(tmp_path.rglob("rank_*.pt"))
