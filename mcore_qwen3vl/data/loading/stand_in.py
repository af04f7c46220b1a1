"""The cache of what is computed from a data set: indexes, and sizes of its samples.

Energon needs an index beside the data. So the cache has a stand-in: links to the data set's files,
with the index beside them, which energon reads instead. Media that a record names are still looked
for beside the data itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from mcore_qwen3vl.files import replacing

_ORIGIN = "origin"  # name of the file, beside a stand-in, that holds the path of the data
_SUFFIXES = (".tar", ".parquet", ".arrow")
_NAMES = ("state.json", "dataset_dict.json")  # files of Hugging Face datasets on disk


def fingerprint(path: Path) -> str:
    """Return the names, sizes and times of the files of a data set (a file or a folder) as JSON."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in _data_files(path)]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _data_files(path: Path) -> list[Path]:
    """Return the files of a data set, without the indexes, scores and logs beside them."""
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if (file.suffix in _SUFFIXES or file.name in _NAMES) and file.is_file()
    )


def data_cache() -> Path:
    """Return the folder that holds the cache folders of all data sets; it need not exist.

    It is ``$XDG_CACHE_HOME/mcore-qwen3vl/data`` (``~/.cache/mcore-qwen3vl/data``).
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches.absolute() / "mcore-qwen3vl" / "data"


def cache_of(path: Path) -> Path:
    """Return the cache folder of a data set in its present state; it need not exist.

    The folder's name is a hash of the path and of the files' sizes and times, so that all processes
    find the same one, and no process loses its index when the data change.
    """
    state = f"{path.absolute()} {fingerprint(path.absolute())}"
    return data_cache() / hashlib.sha256(state.encode()).hexdigest()[:16]


def stand_in_of(path: Path) -> Path:
    """Return the path that energon reads instead of a JSON or JSONL file, or a folder of tars."""
    return cache_of(path) / path.absolute().name


def make_stand_in(path: Path) -> None:
    """Make links in the cache to a file, or to all tars of a folder.


    Raises:
        OSError: the cache cannot be written.
    """
    path = path.absolute()
    made = stand_in_of(path)
    made.parent.mkdir(parents=True, exist_ok=True)
    with replacing(made.parent / _ORIGIN) as partial:  # other ranks may read it meanwhile
        partial.write_text(str(path), encoding="utf-8")
    if not path.is_dir():
        _link(made, path)
        return
    made.mkdir(exist_ok=True)
    for tar in path.rglob("*.tar"):
        _link(made / tar.relative_to(path), tar)


@cache
def origin(path: Path) -> Path:
    """Return the data set that `path` stands for: `path` itself unless it is a stand-in."""
    if not path.is_relative_to(data_cache()):
        return path
    return Path((path.parent / _ORIGIN).read_text(encoding="utf-8"))


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # an earlier run or another rank made it
        place.symlink_to(target)
