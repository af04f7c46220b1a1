"""Energon's indexes, made on first use, and only once even if many ranks start at the same time.

Energon needs an index beside the data. So the cache has a stand-in: links to the data set's files,
with the index beside them, which energon reads instead. Media that a record names are still looked
for beside the data itself. From the indexes come the places of records, for messages.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexWriter
from megatron.energon.flavors.webdataset.config import split_name_re
from megatron.energon.source_info import SourceInfo, get_source_info

from mcore_qwen3vl.data.config import require_data_set
from mcore_qwen3vl.data.loading import readers
from mcore_qwen3vl.data.loading.readers import is_table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write

_PATIENCE = 3600.0  # seconds that other ranks wait for the rank that indexes
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
_ORIGIN = "origin"  # name of the file, beside a stand-in, that holds the path of the data
_SUFFIXES = (".tar", ".parquet", ".arrow")
_NAMES = ("state.json", "dataset_dict.json")  # files of Hugging Face datasets on disk


def ensure_index(path: Path) -> Path:
    """Make the index of a JSON or JSONL file, or of a folder of tars, unless there is one.

    Returns:
        The path that energon reads: `path`, if it needs no index or has one beside it, as energon's
        own preparation leaves it; otherwise its stand-in: links to the data, in a cache folder that
        is named by their state, with the index beside them.

    Raises:
        BadInput: `path` does not exist, is not a data set or is empty, or the cache cannot be
            written.
    """
    if not _needs_index(path) or _is_indexed(path):
        return path
    stand_in = cache_of(path) / path.absolute().name  # in another folder once the data change
    try:
        if not _is_indexed(stand_in):
            _make_stand_in(path.absolute(), stand_in)
            _index_once(stand_in)
    except OSError as error:
        raise BadInput(
            f"The index of {path} cannot be written in {data_cache()} ({error}). Make that "
            "writable, or name another cache with XDG_CACHE_HOME."
        ) from error
    return stand_in


def index_beside(path: Path) -> None:
    """Make an index beside the data, where energon looks for it if a metadataset names the data.

    Raises:
        BadInput: `path` does not exist, is not a data set or is empty.
        OSError: the folder cannot be written.
    """
    if _needs_index(path) and not _is_indexed(path):
        _index_once(path)


def _needs_index(path: Path) -> bool:
    """Return whether energon needs an index; raise BadInput for what is not a data set."""
    require_data_set(path)
    if is_table(path) or path.suffix in (".yaml", ".yml"):
        return False
    if path.is_dir() or path.suffix in (".jsonl", ".json"):
        return True
    raise BadInput(
        f"{path} is not a data set. Name a .jsonl, .json or .parquet file, a folder of "
        "WebDataset .tar files or Parquet shards, a Hugging Face dataset on disk, or a "
        ".yaml of these."
    )


def _is_indexed(path: Path) -> bool:
    if path.is_dir():
        return (path / ".nv-meta" / "dataset.yaml").exists()
    return readers.is_indexed(path)


def _index_once(path: Path) -> None:
    """Make the index under a lock, so that only one of the ranks that need it makes it."""
    lock = path / ".energon.lock" if path.is_dir() else path.with_name(path.name + ".idx.lock")
    try:
        with FileLock(lock, timeout=_PATIENCE):
            if _is_indexed(path):  # another rank has done it meanwhile
                return
            if path.is_dir():
                _index_tars(path)
            elif path.suffix == ".json":
                readers.write_index(path, origin(path))
            else:
                _index_jsonl(path)
    except Timeout:
        raise BadInput(
            f"Waited {_PATIENCE:.0f} s for another process to index {path}. If none is running, "
            f"remove {lock}."
        ) from None


def _index_jsonl(path: Path) -> None:
    """Write the index of a JSONL file.

    Energon's own preparation refuses a file with one broken line; here that line is a bad sample.
    """
    with path.open("rb") as lines, IJsonlIndexWriter(EPath(path)) as index:
        start = end = records = 0
        blanks = []
        for line in lines:
            end += len(line)
            if line.strip():  # blank lines belong to the sample before or after them
                index.append(start)
                start, records = end, records + 1
            else:
                blanks.append(records)
        if start == 0:
            raise BadInput(f"The data set {origin(path)} is empty.")
        index.append(end)
    # A blank line is no record, but counts as a line: the number of records before each is kept.
    if blanks:  # `tofile` would not report a full disk
        _blanks_file(path).write_bytes(np.array(blanks, np.int64).tobytes())
    else:
        _blanks_file(path).unlink(missing_ok=True)


def _index_tars(path: Path) -> None:
    """Make energon's index of a folder of tars; raise BadInput for what it cannot index."""
    tars = sorted(str(tar.relative_to(path)) for tar in path.rglob("*.tar"))
    if not tars:
        raise BadInput(
            f"{origin(path)} holds neither .tar nor .parquet files, nor a Hugging Face dataset "
            "(state.json, dataset_dict.json), nor an energon index (.nv-meta)."
        )
    said = io.StringIO()
    try:
        with redirect_stdout(said):  # a command's own output may be JSON
            BaseWebdatasetFactory.prepare_dataset(
                path, tars, split_parts_ratio=[("train", 1.0)], workers=min(8, len(tars))
            )
    # energon exits where a key comes twice, and asserts that every tar has samples.
    except (SystemExit, AssertionError) as error:
        raise BadInput(_flaw_of_tars(path, tars) or f"{origin(path)}: {error}") from None
    print(said.getvalue(), end="", file=sys.stderr)
    # Written last, so that whoever sees this file finds the rest complete.
    (path / ".nv-meta" / "dataset.yaml").write_text(_CRUDE, encoding="utf-8")


def _flaw_of_tars(path: Path, tars: Sequence[str]) -> str | None:
    """Return a sentence on why the tars of a folder cannot be indexed."""
    places: dict[str, str] = {}
    for name in tars:
        there, before = f"{origin(path) / name}", None
        try:
            with tarfile.open(path / name) as tar:
                files = [member.name for member in tar if member.isfile()]
        except (tarfile.TarError, OSError, EOFError) as error:
            return f"{there} is damaged: {error}. Write it again, or move it out of the folder."
        matches = [match for file in files if (match := split_name_re.match(file))]
        if not matches:
            return f"{there} holds no sample: move it out of the folder."
        for match in matches:
            if (key := match[1]) == before:
                continue
            if places.get(key) == there:
                return (
                    f"{there}: the files of the sample {key} lie apart, {match[0]} after those of "
                    "other samples. Write the files of a sample one after the other, as "
                    "`tar --sort=name` does."
                )
            if key in places:
                return (
                    f"{places[key]} and {there} both have a sample {key}, and each needs a name "
                    "of its own: put the files of each tar into a folder inside it."
                )
            places[key], before = there, key
    return None


def line_of(path: Path, record: int) -> int:
    """Return the line, from 1, of a record, from 0, in an indexed JSONL file."""
    return record + 1 + int(np.searchsorted(_records_before_blanks(path), record, side="right"))


def record_of(path: Path, line: int) -> int:
    """Return the record, from 0, on a JSONL file's line, from 1; raise BadInput if it is blank."""
    blanks = _records_before_blanks(path)
    # The n-th blank line, from 0, is line blanks[n] + n + 1.
    before = int(np.searchsorted(blanks + np.arange(len(blanks)) + 1, line))
    record = line - 1 - before
    if line_of(path, record) != line:
        raise BadInput(f"Line {line:,} of {origin(path)} is blank.")
    return record


def _blanks_file(path: Path) -> Path:
    return path.with_name(path.name + ".idx.blank")


def _records_before_blanks(path: Path) -> np.ndarray:
    """Return, for each blank line of a JSONL file, the number of records before it; ascending."""
    try:
        written = os.stat(_blanks_file(path)).st_mtime_ns
    except FileNotFoundError:
        return np.zeros(0, np.int64)
    return _read_blanks(_blanks_file(path), written)


@cache
def _read_blanks(file: Path, written: int) -> np.ndarray:
    """Read the file; `written`, its time, makes the cache forget one that was written again."""
    return np.fromfile(file, np.int64)


@dataclass(frozen=True)
class Place:
    """The place of a record in its file."""

    file: Path
    number: int
    """The line of a JSONL file, or the record of another file, from 1."""

    @property
    def is_line(self) -> bool:
        """Whether `number` is a line, as an editor counts them."""
        return self.file.suffix == ".jsonl"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.is_line else f"{self.file}[{self.number}]"


def place_of(source: SourceInfo) -> Place:
    """Return the place from which energon read a sample."""
    indexed = Path(str(source.dataset_path))
    dataset = origin(indexed)
    if dataset.suffix == ".jsonl":
        return Place(dataset, line_of(indexed, int(source.index)))
    file = dataset if source.shard_name == dataset.name else dataset / source.shard_name
    return Place(file, int(source.index) + 1)


def number_of(sample: Any) -> int:
    """Return the number, from 0, that a sample's record has in its file."""
    return int(get_source_info(sample)[0].index)


def sample_id(sample: Any) -> str:
    """Return where a sample comes from: ``file:line`` for JSONL, else ``file[record]``."""
    # energon passes the raw tuple of a joined sample, or a list of samples, to its error handler
    inner = getattr(sample, "data", sample)
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner
    sources = get_source_info(inner)
    if not sources:
        return str(inner["__key__"] if isinstance(inner, dict) else inner)[:200]
    return str(place_of(sources[0]))


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


def _make_stand_in(path: Path, made: Path) -> None:
    """Make links in the cache to a file, or to all tars of a folder."""
    made.parent.mkdir(parents=True, exist_ok=True)
    # Other ranks may read it meanwhile.
    with atomic_write(made.parent / _ORIGIN, remedy=None) as partial:
        partial.write_text(str(path), encoding="utf-8")
    if not path.is_dir():
        _link_once(made, path)
        return
    made.mkdir(exist_ok=True)
    for tar in path.rglob("*.tar"):
        _link_once(made / tar.relative_to(path), tar)


@cache
def origin(path: Path) -> Path:
    """Return the data set that `path` stands for: `path` itself unless it is a stand-in."""
    if not path.is_relative_to(data_cache()):
        return path
    return Path((path.parent / _ORIGIN).read_text(encoding="utf-8"))


def _link_once(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # an earlier run or another rank made it
        place.symlink_to(target)
