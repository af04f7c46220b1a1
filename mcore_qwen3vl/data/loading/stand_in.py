"""Where the cache holds what is computed from a data set: indexes, and sizes of its samples.

Energon wants an index beside the data. So the cache has links to the files of a data set, a
stand-in, with the index beside them, for energon to read in its place; what a record names is still
looked for where the data really is.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path

from mcore_qwen3vl.atomic import replacing
from mcore_qwen3vl.runtime.cache import cache_folder

_ORIGIN = "origin"  # the file, beside a stand-in, that says what it stands for
_SUFFIXES = (".tar", ".parquet", ".arrow")
_NAMES = ("state.json", "dataset_dict.json")  # of Hugging Face datasets on disk


def fingerprint(path: Path) -> str:
    """Names, sizes and times of the files of a data set, which may be a file or a folder."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in _data_files(path)]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _data_files(path: Path) -> list[Path]:
    """The files of a data set, without the indexes, scores and logs that lie beside them."""
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if (file.suffix in _SUFFIXES or file.name in _NAMES) and file.is_file()
    )


def data_cache() -> Path:
    """The folder of all data sets' folders."""
    return cache_folder().absolute() / "data"


def cache_of(path: Path) -> Path:
    """The folder for a data set in its present state; it need not exist.

    The path, the sizes and the times of its files decide its name, so that all processes find the
    same one, and none of them loses its index while the data change.
    """
    state = f"{path.absolute()} {fingerprint(path.absolute())}"
    return data_cache() / hashlib.sha256(state.encode()).hexdigest()[:16]


def stand_in_of(path: Path) -> Path:
    """What energon is to read in place of a JSON or JSONL file, or of a folder of tars."""
    return cache_of(path) / path.absolute().name


def make_stand_in(path: Path) -> None:
    """Link a file, or all tars of a folder, from the cache.

    Raises:
        OSError: the cache cannot be written.
    """
    path = path.absolute()
    made = stand_in_of(path)
    made.parent.mkdir(parents=True, exist_ok=True)
    with replacing(made.parent / _ORIGIN) as partial:  # whole for ranks that read it meanwhile
        partial.write_text(str(path), encoding="utf-8")
    if not path.is_dir():
        _link(made, path)
        return
    made.mkdir(exist_ok=True)
    for tar in path.rglob("*.tar"):
        _link(made / tar.relative_to(path), tar)


@cache
def origin(path: Path) -> Path:
    """The data set that `path` stands for: `path` itself unless it is a stand-in."""
    if not path.is_relative_to(data_cache()):
        return path
    return Path((path.parent / _ORIGIN).read_text(encoding="utf-8"))


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # made before, or by another rank
        place.symlink_to(target)
