"""A resumed run reads the data that its checkpoint was trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.checkpoints import data_state


class Standing:
    """A loader that is where it was told to be."""

    state: dict[str, Any]

    def state_dict(self, position: Any = None) -> dict[str, Any]:
        return {"world_size": 1, "num_workers": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def folder_of(path: Path, size: int) -> Any:
    """Return a data set of two files, with an index and a hidden file of other sizes."""
    (path / ".nv-meta").mkdir(parents=True)
    for name, length in (("0.tar", size), ("1.tar", 7)):
        (path / name).write_bytes(bytes(length))
    (path / "0.tar.idx").write_bytes(bytes(size * 3))
    (path / ".nv-meta" / "index").write_bytes(bytes(size * 5))
    return SimpleNamespace(path=path)


def test_another_folder_is_not_taken_for_the_one_of_the_checkpoint(tmp_path: Path) -> None:
    ours = folder_of(tmp_path / "ours", 100)
    data_state.save(Standing(), tmp_path, 3, 0, [ours], 4)  # type: ignore[arg-type]
    loader: Any = Standing()
    with pytest.raises(BadInput, match=r"on ours \(107 bytes\), .* names other \(108 bytes\)"):
        data_state.load(loader, tmp_path, 3, 0, 1, [folder_of(tmp_path / "other", 101)])
    (tmp_path / "ours" / "1.tar.idx").write_bytes(bytes(50))  # made after the checkpoint
    data_state._size.cache_clear()  # as in the process that resumes
    data_state.load(loader, tmp_path, 3, 0, 1, [ours])
    assert loader.state["num_workers"] == 0
