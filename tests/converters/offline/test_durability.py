"""Nothing is published or noted as done before it is on the disk: data first, then names."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.layout import Layout


class NotDurable(Exception):
    """Something that a power cut could remove was published or noted as done."""


class Disk:
    """A watch on syncs and renames while a checkpoint is written to `target`.

    A sync makes a file's content durable, or the names in a folder.
    Whenever the journal is synced, all files of the tree must be durable. When the tree is
    renamed to `target`, its folders and the journal must be durable too.

    Attributes:
        syncs: the number of syncs by each function.
        published: whether `target` appeared by a rename.
    """

    def __init__(self, patch: pytest.MonkeyPatch, target: Path, ignored: str = "") -> None:
        """Start to watch; syncs by the function named `ignored` have no effect."""
        self.syncs: Counter[str] = Counter()
        self.published = False
        self._target, self._ignored = target, ignored
        self._durable: dict[Path, Any] = {}
        patch.setattr(os, "fsync", self._sync)
        self._rename = Path.rename
        patch.setattr(Path, "rename", lambda path, new: self._renamed(path, new))

    def finish(self) -> None:
        """Check that `target` was published and its name is durable."""
        if not self.published:
            raise NotDurable(f"{self._target} did not appear by a rename")
        if self._target.name not in self._durable.get(self._target.parent, ()):
            raise NotDurable(f"the name {self._target.name} is not durable")

    def _sync(self, descriptor: int) -> None:
        place = sys._getframe(1).f_code.co_qualname
        self.syncs[place] += 1
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "journal":
            self._require(path.parent / "tree", folders=False)
        if place != self._ignored:
            self._durable[path] = _state(path)

    def _renamed(self, path: Path, new: Path) -> Path:
        if new == self._target:
            self._require(path, folders=True)
            self._require(path.parent / "journal", folders=True)
            self.published = True
        return self._rename(path, new)

    def _require(self, top: Path, *, folders: bool) -> None:
        for path in [top, *top.rglob("*")]:
            if (folders or path.is_file()) and self._durable.get(path) != _state(path):
                raise NotDurable(f"{path} is not durable as it is")


def _state(path: Path) -> Any:
    if path.is_dir():
        return sorted(file.name for file in path.iterdir())
    return hashlib.sha256(path.read_bytes()).hexdigest()


Tiny = Callable[[str], Path]
Convert = Callable[[Path], object]

EVERYWHERE = {"DirectFile.sync", "append_durably", "sync_folder", "write_durably"}
PLACES = {
    "hf-to-mcore": EVERYWHERE,
    "hf-to-legacy": EVERYWHERE,
    "mcore-to-hf": {*EVERYWHERE, "Shard.create"},
}
"""All functions that sync, by direction."""


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (to_mcore, to_hf):
        monkeypatch.setattr(module, "unit_bytes", lambda total: 300_000)


@pytest.fixture
def convert(tiny: Tiny, mcore_dense: Path, direction: str) -> Convert:
    return {
        "hf-to-mcore": partial(hf_to_mcore, tiny("dense"), workers=1),
        "hf-to-legacy": partial(
            hf_to_mcore, tiny("dense"), workers=1, format="torch", layout=Layout(tp=2, pp=2)
        ),
        "mcore-to-hf": partial(mcore_to_hf, mcore_dense, workers=1, max_shard_size="600KB"),
    }[direction]


@pytest.mark.parametrize("direction", PLACES)
def test_what_is_published_is_on_the_disk(
    convert: Convert, tmp_path: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path / "target")
    convert(tmp_path / "target")
    disk.finish()
    assert set(disk.syncs) == PLACES[direction]


@pytest.mark.parametrize(
    ("direction", "place"), [(d, place) for d, places in PLACES.items() for place in sorted(places)]
)
def test_every_sync_is_needed(
    convert: Convert, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any one of them is left out, the test above fails."""
    disk = Disk(monkeypatch, tmp_path / "target", ignored=place)

    def run() -> None:
        convert(tmp_path / "target")
        disk.finish()

    with pytest.raises(NotDurable):
        run()
