"""Nothing is published or noted as done before it is on the disk: data first, then names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.layout import Layout
from tests.converters.disk import Disk, NotDurable

Tiny = Callable[[str], Path]
Convert = Callable[[Path], object]

EVERYWHERE = {"DirectFile.sync", "Staging.finish", "sync_folder", "write_durably"}
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
