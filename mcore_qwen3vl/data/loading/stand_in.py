"""Links to data whose own folder cannot be written, for energon to read in its place.

Energon wants an index beside the data. A stand-in lies in the cache, with the index beside it; what
a record names is still looked for where the data really is.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from mcore_qwen3vl.runtime.cache import cache_folder

_ORIGIN = "origin"  # the file, beside a stand-in, that says what it stands for


def stand_ins() -> Path:
    """The folder of all of them."""
    return cache_folder().absolute() / "indexes"


def make_stand_in(path: Path) -> Path:
    """Link a JSONL file, or all tars of a folder, from the cache.

    Raises:
        OSError: the cache cannot be written.
    """
    path = path.absolute()
    folder = stand_ins() / hashlib.sha256(str(path).encode()).hexdigest()[:16]
    made = folder / path.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ORIGIN).write_text(str(path), encoding="utf-8")
    if not path.is_dir():
        _link(made, path)
        return made
    made.mkdir(exist_ok=True)
    for tar in path.rglob("*.tar"):
        _link(made / tar.relative_to(path), tar)
    return made


@cache
def origin(path: Path) -> Path:
    """The data set that `path` stands for: `path` itself unless it is a stand-in."""
    if not path.is_relative_to(stand_ins()):
        return path
    return Path((path.parent / _ORIGIN).read_text(encoding="utf-8"))


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # made before, or by another rank
        place.symlink_to(target)
